"""Everything around the router's flow, in memory."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from builders import make_fleet_record, make_instance

from indexer.contract import block_hash
from indexer.contract.milestones import Milestones
from indexer.contract.records import COUNTERS_RECORD, FleetCounters, InstanceRecord, SlotFlag
from indexer.contract.request_classes import ClassPrefixes
from router.course import DispatchBounds
from router.decide import decide
from router.door.admission import Admission, Ticket
from router.door.key_limits import KeyLimiter
from router.door.visitor import Visitor
from router.eligibility import Roster, Sighting
from router.errors import (
    IndexUnavailable,
    NoEligibleInstance,
    RouterError,
    TokensUnknown,
    UpstreamFailed,
)
from router.index.known_fleets import ServedModel
from router.index.redis_guard import RedisGuard
from router.instances.answer import Answer
from router.instances.ejections import Ejections
from router.instances.standing import EjectionRules
from router.policies import POLICIES
from router.prefill_costs import PrefillCosts
from router.request_record import RequestRecord
from router.requests.api_call import ApiCall, TokenPrompt
from router.route import Router
from router.snapshot import Booking, Decision
from router.tokens.hash_chains import HashChains
from router.tokens.tokenize import EncodedPrompt

IDS = list(range(100))


def make_call(**changes: Any) -> ApiCall:
    """100 token ids for model m."""
    values: dict[str, Any] = {
        "path": "/v1/completions",
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
    computed_: list[tuple[bool, bytes]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    booked: list[Booking] = field(default_factory=list)
    prefilled_: list[Booking] = field(default_factory=list)
    awaited_: list[tuple[Booking, bytes]] = field(default_factory=list)
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
        self, served: ServedModel, hashes: bytes, *_: Milestones | ClassPrefixes | None
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
        self, policy: Any, request: Any, snapshot: Any, milestones: Milestones | None, *_: Any
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

    def unbooked(self, policy: Any, request: Any, snapshot: Any) -> tuple[Decision, Booking]:
        """The best of the snapshot, with nothing booked."""
        return decide(policy, request, snapshot), Booking(fleet=snapshot.fleet, sequence=-1)

    def awaits(self, booking: Booking, block: bytes) -> None:
        """Note it."""
        self.awaited_.append((booking, block))

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

    def computed(self, decision: Decision, hashes: bytes) -> None:
        """Note it."""
        self.computed_.append((decision.approximate, hashes))

    # -- Upstream

    async def open(self, instance: InstanceRecord, _: ApiCall) -> Answer:
        """Fail as told, or answer."""
        self.asked.append(instance.instance_id)
        failure = self.failures.get(instance.instance_id, 200)
        if isinstance(failure, Exception):
            raise failure
        connection: Any = None
        return Answer(
            instance=instance,
            status=failure,
            headers=[("Content-Type", "text/event-stream" if self.call.stream else "x/json")],
            first=b"x",
            sent_s=0.0,
            first_byte_s=0.0,
            connection=connection,
        )

    def close(self, answer: Answer) -> None:
        """There is no connection to keep."""

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
            packed=call.prompt.packed[0],
            prompt_tokens=sum(counts),
            longest_tokens=max(counts),
            last_packed=call.prompt.packed[-1],
        )

    # -- Exchange

    visitor = Visitor()

    def tell_limits(self, _: Any) -> None:
        """Nobody has any."""

    async def receive(self, _: Ticket) -> ApiCall:
        """The call."""
        return self.call

    async def start(self, _: Answer, __: Decision, ___: Decision | None = None) -> None:
        """Note it."""
        self.started = True

    def wire(self) -> None:
        """Everything comes through `write`."""

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
            "key_limiter": KeyLimiter(parts, guard=RedisGuard(deadline_s=1.0)),
            "tokenizer": parts,
            "chains": HashChains(),
            "index": parts,
            "ledger": parts,
            "upstream": parts,
            "predictions": parts,
            "policies": POLICIES,
            "default_policy": "lmetric",
            "allow_policy_override": False,
            "ejections": Ejections(EjectionRules()),
            "bounds": DispatchBounds(retries_max=2, total_timeout_s=60.0),
            "prefill_costs": PrefillCosts(),
            "aliases": {},
        }
        return Router(**values | options)


def failure(name: str, **changes: Any) -> UpstreamFailed:
    """An instance that does not answer."""
    values: dict[str, Any] = {"before_first_byte": True} | changes
    return UpstreamFailed(make_instance(name).instance_id, "no", **values)
