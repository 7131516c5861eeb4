"""The flow: what is looked up, who is asked, and what is given back, whatever happens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from builders import make_fleet_record, make_instance

from indexer.contract import block_hash
from indexer.contract.milestones import Milestones
from indexer.contract.records import COUNTERS_RECORD, FleetCounters, InstanceRecord, SlotFlag
from router.admission import Admission, Ticket
from router.api_call import ApiCall, Endpoint, TextPrompt, TokenPrompt
from router.decide import decide
from router.eligibility import Roster, Sighting
from router.errors import (
    DegradedCause,
    DropReason,
    IndexUnavailable,
    ModelUnknown,
    NoEligibleInstance,
    RequestInvalid,
    RouterError,
    TokensUnknown,
    UpstreamFailed,
)
from router.policies import POLICIES
from router.route import Router
from router.served import ServedModel
from router.snapshot import Booking, Decision
from router.telemetry import DEGRADED, RequestRecord
from router.tokenize import EncodedPrompt
from router.upstream import Answer

IDS = list(range(100))


def make_call(**changes: Any) -> ApiCall:
    """100 token ids for model m."""
    values: dict[str, Any] = {
        "endpoint": Endpoint.COMPLETIONS,
        "body": b"x" * 400,
        "headers": (),
        "request_id": "r",
        "model": "m",
        "stream": True,
        "prompt": TokenPrompt(packed=(block_hash.pack_tokens(IDS),)),
    }
    return ApiCall(**values | changes)


@dataclass
class FakeParts:
    """Everything around the flow, in memory; notes what it is asked.

    Attributes:
        call: what the client sends.
        failures: instance id -> what its dispatch raises, or the status it answers.
        breaks: raised in the middle of the answer.
    """

    call: ApiCall = field(default_factory=make_call)
    failures: dict[str, Exception | int] = field(default_factory=dict)
    breaks: Exception | None = None
    names: tuple[str, ...] = ("a", "b", "c")
    adapter: str | None = None
    block_size_tokens: int = 16
    heard_s: float = 0.0
    token_error: TokensUnknown | None = None
    known: tuple[str, ...] = ("m",)
    asked: list[str] = field(default_factory=list)
    redis_away: bool = False
    ledger_away: bool = False
    gone: int = 0
    lookups: list[bytes] = field(default_factory=list)
    milestones: list[Milestones | None] = field(default_factory=list)
    settled: list[tuple[str, bytes, int | None]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    booked: list[Booking] = field(default_factory=list)
    prefilled_: list[Booking] = field(default_factory=list)
    released: list[Booking] = field(default_factory=list)
    started: bool = False
    broken_off: list[RouterError] = field(default_factory=list)

    # -- IndexClient

    def models(self) -> dict[str, ServedModel]:
        """Known names."""
        served = ServedModel(
            name="m",
            fleet=make_fleet_record(block_size_tokens=self.block_size_tokens),
            adapter=self.adapter,
            max_model_len_tokens=101,
            model_root="m",
            roster=Roster.of({0: make_instance()}),
        )
        return dict.fromkeys(self.known, served)

    async def find(self, model: str) -> ServedModel | None:
        """From `models`."""
        return self.models().get(model)

    def is_scope(self, model: str) -> bool:
        """Names of fleets, with instances or without."""
        return model in {"m", "emptied"}

    def heard_age_s(self) -> float:
        """As given."""
        return self.heard_s

    async def look(
        self, served: ServedModel, hashes: bytes, _: Milestones | None = None
    ) -> Sighting:
        """All idle, the first with one block; or fail as told."""
        self.lookups.append(hashes)
        if self.redis_away:
            raise IndexUnavailable("away")
        return self.sighting(served, [1] + [0] * (len(self.names) - 1), degraded=False)

    def last_sighting(self, served: ServedModel) -> Sighting:
        """All idle, without hits."""
        return self.sighting(served, [0] * len(self.names), degraded=True)

    def sighting(self, served: ServedModel, depths: list[int], *, degraded: bool) -> Sighting:
        """These instances in slots 0, 1, ...; alive."""
        slots = np.zeros(len(self.names), COUNTERS_RECORD)
        slots["flags"], slots["lease_until_s"] = SlotFlag.USED, 1.0
        return Sighting(
            fleet=served.fleet,
            roster=Roster.of({i: make_instance(name) for i, name in enumerate(self.names)}),
            counters=FleetCounters(now_s=0.0, membership=1, epoch=7, slots=slots),
            depth_blocks=np.array(depths, np.int64),
            taken_s=0.0,
            degraded=degraded,
        )

    # -- Ledger

    async def reserve(
        self, policy: Any, request: Any, snapshot: Any, milestones: Milestones | None
    ) -> tuple[Decision, Booking]:
        """The best of the snapshot; or fail as told."""
        if self.ledger_away:
            raise IndexUnavailable("away")
        self.milestones.append(milestones)
        if self.gone:
            self.gone -= 1
            raise NoEligibleInstance("gone")
        return self.reserve_alone(policy, request, snapshot)

    def reserve_alone(self, policy: Any, request: Any, snapshot: Any) -> tuple[Decision, Booking]:
        """The best of the snapshot."""
        self.prompt_tokens.append(request.prompt_tokens)
        booking = Booking(fleet=snapshot.fleet, sequence=len(self.booked))
        self.booked.append(booking)
        return decide(policy, request, snapshot, booked_s=0.0), booking

    def prefilled(self, booking: Booking) -> None:
        """Note it."""
        self.prefilled_.append(booking)

    def release(self, booking: Booking) -> None:
        """Note it."""
        self.released.append(booking)

    # -- Predictions

    def settle(self, _: ApiCall, decision: Decision, hashes: bytes, record: RequestRecord) -> None:
        """Note it."""
        self.settled.append((decision.instance.instance_id, hashes, record.cached_tokens))

    # -- Upstream

    @asynccontextmanager
    async def open(self, instance: InstanceRecord, _: ApiCall) -> AsyncIterator[Answer]:
        """Fail as told, or answer."""
        self.asked.append(instance.instance_id)
        failure = self.failures.get(instance.instance_id, 200)
        if isinstance(failure, Exception):
            raise failure
        content: Any = None
        yield Answer(
            instance=instance,
            status=failure,
            headers=[("Content-Type", "text/event-stream" if self.call.stream else "x/json")],
            first=b"x",
            sent_s=0.0,
            first_byte_s=0.0,
            content=content,
        )

    async def relay(self, answer: Answer, sink: Any) -> None:
        """One chunk, then break as told."""
        await sink.write(answer.first)
        answer.output_bytes += 1
        if self.breaks is not None:
            raise self.breaks

    # -- Tokenizer

    async def encode(self, _: ServedModel, call: ApiCall) -> EncodedPrompt:
        """Fail as told, or take the ids."""
        if self.token_error is not None:
            raise self.token_error
        assert isinstance(call.prompt, TokenPrompt)
        counts = [len(packed) // 4 for packed in call.prompt.packed]
        return EncodedPrompt(
            packed=call.prompt.packed[0], prompt_tokens=sum(counts), longest_tokens=max(counts)
        )

    # -- Exchange

    async def receive(self, _: Ticket) -> ApiCall:
        """The call."""
        return self.call

    async def start(self, _: Answer, __: Decision) -> None:
        """Note it."""
        self.started = True

    async def write(self, _: bytes) -> None:
        """Take it."""

    async def finish(self) -> None:
        """Take it."""

    async def break_off(self, error: RouterError) -> None:
        """Note it."""
        self.broken_off.append(error)

    async def routed(self, **options: Any) -> RequestRecord:
        """Route the call; the record, also when the flow raised."""
        record = RequestRecord(request_id="r", accepted_s=asyncio.get_running_loop().time())
        try:
            await self.router(**options).route(self, record)
        finally:
            assert self.booked == self.released
        return record

    def router(self, **options: Any) -> Router:
        """A router made of these parts."""
        parts: Any = self
        values: dict[str, Any] = {
            "admission": Admission(requests_max=1, bytes_max=1),
            "tokenizer": parts,
            "index": parts,
            "ledger": parts,
            "upstream": parts,
            "predictions": parts,
            "policies": POLICIES,
            "default_policy": "lmetric",
            "allow_policy_override": False,
            "retries_max": 2,
        }
        return Router(**values | options)


def failure(name: str, **changes: Any) -> UpstreamFailed:
    """An instance that does not answer."""
    values: dict[str, Any] = {"before_first_byte": True} | changes
    return UpstreamFailed(make_instance(name).instance_id, "no", **values)


async def test_a_request_is_looked_up_sent_and_recorded() -> None:
    """By the chain of its full blocks, to the instance that holds one of them."""
    parts = FakeParts()
    record = await parts.routed()
    root = block_hash.root(model_scope="m", block_size_tokens=16)
    hashes = block_hash.chain(root, block_hash.pack_tokens(IDS), 16)
    assert (parts.lookups, parts.prompt_tokens) == ([hashes], [100])
    assert (parts.asked, parts.prefilled_) == (["a"], parts.booked)
    shown = (record.outcome, record.status, record.instance_id, record.hit_tokens)
    assert shown == ("completed", 200, "a", 16)
    assert (record.prompt_tokens, record.new_prefill_tokens, record.output_bytes) == (100, 84, 1)


async def test_an_answer_is_compared_with_its_prediction() -> None:
    """With the chain it was predicted from and what the engine reported, also when it broke off."""
    parts = FakeParts()
    await parts.routed()
    assert parts.settled == [("a", parts.lookups[0], None)]
    broken = FakeParts(breaks=failure("a", before_first_byte=False))
    await broken.routed()
    assert len(broken.settled) == 1


async def test_log_probabilities_of_the_prompt_hit_nothing() -> None:
    """The engine computes every token, so nothing is looked up."""
    parts = FakeParts(call=make_call(reads_prefixes=False))
    await parts.routed()
    assert parts.lookups == [b""]


@pytest.mark.parametrize(("options", "counted"), [({}, True), ({"in_flight_credit": False}, False)])
async def test_a_long_prompt_is_known_to_its_siblings(
    options: dict[str, bool], counted: bool
) -> None:
    """By depths of its chain; a short one, or with the option off, by none."""
    long = TokenPrompt(packed=(block_hash.pack_tokens([1] * 100),))
    parts = FakeParts(call=make_call(prompt=long), block_size_tokens=4)
    await parts.routed(**options)
    assert [m.depths_tokens() if m else None for m in parts.milestones] == [
        [64, 80, 96, 100] if counted else None
    ]
    short = FakeParts()
    await short.routed(**options)
    assert short.milestones == [None]


async def test_salt_and_adapter_are_in_the_root() -> None:
    """Another salt or adapter is another cache."""
    parts = FakeParts(call=make_call(cache_salt="s"), adapter="lora")
    await parts.routed()
    root = block_hash.root(model_scope="m", block_size_tokens=16, adapter="lora", salt="s")
    assert parts.lookups[0] == block_hash.chain(root, block_hash.pack_tokens(IDS), 16)


async def test_several_prompts_are_looked_up_by_the_first() -> None:
    """Their tokens are counted together."""
    packed = block_hash.pack_tokens(IDS[:32]), block_hash.pack_tokens(IDS[:50])
    parts = FakeParts(call=make_call(prompt=TokenPrompt(packed=packed), prompts_count=2))
    record = await parts.routed()
    assert ([len(hashes) for hashes in parts.lookups], parts.prompt_tokens) == ([16], [82])
    assert record.prompts_count == 2


async def test_a_plain_answer_keeps_its_prefill_until_the_end() -> None:
    """Its first byte says nothing about its first token."""
    parts = FakeParts(call=make_call(stream=False))
    await parts.routed()
    assert parts.prefilled_ == []


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [failure("a"), 503], ids=["fails", "answers 503"])
async def test_another_instance_is_asked_and_the_first_one_never_again(bad: Any) -> None:
    """The reservations of both are released."""
    parts = FakeParts(failures={"a": bad})
    record = await parts.routed()
    assert parts.asked[0] == "a"
    assert (len(parts.asked), len(set(parts.asked)), record.retries_count) == (2, 2, 1)
    assert record.outcome == "completed"


@pytest.mark.parametrize(("retries_max", "expected"), [(0, 1), (1, 2), (9, 3)])
async def test_retries_have_a_bound(retries_max: int, expected: int) -> None:
    """As many as configured, and never more than there are instances."""
    parts = FakeParts(failures={name: failure(name) for name in "abc"})
    with pytest.raises(UpstreamFailed):
        await parts.routed(retries_max=retries_max)
    assert len(parts.asked) == expected


async def test_a_timeout_is_not_repeated() -> None:
    """The client has waited long enough, and the prompt is the likely reason."""
    parts = FakeParts(failures={"a": failure("a", timeout=True)})
    with pytest.raises(UpstreamFailed):
        await parts.routed()
    assert parts.asked == ["a"]


async def test_a_last_pushback_is_the_answer() -> None:
    """With nobody left to ask, the engine's answer is passed on."""
    parts = FakeParts(names=("a",), failures={"a": 503})
    record = await parts.routed()
    assert (record.status, record.outcome, parts.started) == (503, "completed", True)


async def test_a_broken_answer_is_broken_off_not_repeated() -> None:
    """The client has a part of it already."""
    error = failure("a", before_first_byte=False)
    parts = FakeParts(breaks=error)
    record = await parts.routed()
    assert (parts.asked, parts.broken_off) == (["a"], [error])
    assert record.outcome == DropReason.UPSTREAM_FAILED


@pytest.mark.parametrize("defect", [asyncio.CancelledError(), ZeroDivisionError()])
async def test_whatever_ends_the_request_releases_it(defect: BaseException) -> None:
    """A client that leaves, a defect: the books balance."""
    breaks: Any = defect
    parts = FakeParts(breaks=breaks)
    with pytest.raises(type(defect)):
        await parts.routed()
    assert len(parts.released) == 1


# -- what cannot be routed as it is ---------------------------------------------------------------


@pytest.mark.parametrize(
    "cause",
    [
        DegradedCause.TOKENIZER_UNAVAILABLE,
        DegradedCause.TOKENIZER_SLOW,
        DegradedCause.TEMPLATE_FAILED,
    ],
)
async def test_without_token_ids_a_request_is_routed_without_hits(cause: DegradedCause) -> None:
    """With a length from its body, counted as degraded, and answered."""
    parts = FakeParts(token_error=TokensUnknown(cause, "no"))
    record = await parts.routed()
    assert (parts.lookups, parts.prompt_tokens) == ([b""], [100])
    assert (record.outcome, record.degraded, record.degraded_cause) == ("completed", True, cause)


@pytest.mark.parametrize(
    ("changes", "cause", "hit_tokens"),
    [
        ({"redis_away": True}, DegradedCause.INDEX_UNAVAILABLE, 0),
        ({"ledger_away": True}, DegradedCause.LEDGER_UNAVAILABLE, 16),
    ],
)
async def test_without_redis_a_request_is_routed_by_what_is_known(
    changes: dict[str, Any], cause: DegradedCause, hit_tokens: int
) -> None:
    """By the last known fleet, or by this router's own book; counted as degraded, and answered."""
    before = DEGRADED.labels(cause=cause)._value.get()
    record = await FakeParts(**changes).routed()
    assert (record.outcome, record.degraded, record.degraded_cause) == ("completed", True, cause)
    assert record.hit_tokens == hit_tokens
    assert DEGRADED.labels(cause=cause)._value.get() == before + 1


async def test_candidates_that_have_gone_are_looked_for_again_once() -> None:
    """Between the look and the booking a fleet may change; twice in a row is an answer."""
    parts = FakeParts(gone=1)
    assert (await parts.routed()).outcome == "completed"
    assert len(parts.lookups) == 2

    with pytest.raises(NoEligibleInstance):
        await FakeParts(gone=2).routed()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"call": make_call(model="z")}, ModelUnknown, "`z` does not exist. Models served here: m"),
        ({"known": ()}, NoEligibleInstance, "No instance"),
        ({"call": make_call(model="emptied")}, NoEligibleInstance, "No instance of `emptied`"),
        ({"known": (), "heard_s": 60.0}, IndexUnavailable, "Redis"),
        (
            {"call": make_call(prompt=TokenPrompt(packed=(block_hash.pack_tokens([1] * 101),)))},
            RequestInvalid,
            "101 tokens, and `m` takes at most 101",
        ),
        (
            {
                "call": make_call(
                    body=b"x" * ((1 << 20) + 1),
                    prompt=TextPrompt(texts=("x",), add_special_tokens=True),
                )
            },
            RequestInvalid,
            "1048577 bytes, which cannot be the 101 tokens",
        ),
        ({"call": make_call(policy="linear")}, RequestInvalid, "--allow_policy_override"),
    ],
)
async def test_what_cannot_be_routed_reaches_no_instance(
    changes: dict[str, Any], error: type[RouterError], words: str
) -> None:
    """The message says why."""
    parts = FakeParts(**changes)
    with pytest.raises(error) as caught:
        await parts.routed()
    assert words in str(caught.value)
    assert (parts.asked, parts.booked) == ([], [])


async def test_a_request_may_choose_its_policy_where_that_is_allowed() -> None:
    """An unknown name lists the known ones."""
    parts = FakeParts(call=make_call(policy="round_robin"))
    assert (await parts.routed(allow_policy_override=True)).policy == "round_robin"
    parts = FakeParts(call=make_call(policy="best"))
    with pytest.raises(RequestInvalid, match=r"known policies: .*lmetric"):
        await parts.routed(allow_policy_override=True)


async def test_explaining_books_and_sends_nothing() -> None:
    """The same decision as `route` takes."""
    parts = FakeParts()
    record = RequestRecord(request_id="r", accepted_s=0.0)
    decision = await parts.router().explain(parts, record)
    assert (decision.instance.instance_id, decision.hit_tokens) == ("a", 16)
    assert (parts.asked, parts.booked) == ([], [])
