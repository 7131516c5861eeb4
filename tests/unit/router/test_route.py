"""The flow: what is looked up, who is asked, and what is given back, whatever happens."""

import asyncio
from typing import Any

import pytest
from route_parts import IDS, FakeParts, failure, make_call
from waiting import until_equal

from indexer.contract import block_hash
from router.course import DispatchBounds
from router.errors import (
    DegradedCause,
    DropReason,
    IndexUnavailable,
    ModelUnknown,
    NoEligibleInstance,
    RequestInvalid,
    RouterError,
    TokensUnknown,
    UpstreamCause,
    UpstreamFailed,
)
from router.prefill_costs import PrefillCosts
from router.request_record import RequestRecord
from router.requests.api_call import Cost, OpaquePrompt, TextPrompt, TokenPrompt
from router.telemetry import DEGRADED


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


async def test_log_probabilities_of_the_prompt_hit_nothing() -> None:
    """The engine computes every token, so nothing is looked up."""
    parts = FakeParts(call=make_call(reads_prefixes=False))
    await parts.routed()
    assert parts.lookups == [b""]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, 1),
        ({"cost": Cost.NONE}, 0),  # the stream of a stored answer begins when there is news
        ({"names_response": "resp_0", "reads_prefixes": False}, 0),  # longer than is known
    ],
)
async def test_a_first_byte_tells_what_a_known_prompt_costs(
    changes: dict[str, Any], seen: int
) -> None:
    """And says nothing where there is no prompt, or more of it in the engine."""
    costs, told = PrefillCosts(), list[float]()
    costs.seen = lambda *_, seconds, **__: told.append(seconds)  # type: ignore[method-assign]
    parts, record = (
        FakeParts(call=make_call(**changes)),
        RequestRecord(request_id="r", accepted_s=0),
    )
    await parts.router(prefill_costs=costs).route(parts, record)
    assert len(told) == seen


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
        await parts.routed(bounds=DispatchBounds(retries_max=retries_max, total_timeout_s=60.0))
    assert len(parts.asked) == expected


async def test_a_timeout_is_not_repeated() -> None:
    """The client has waited long enough, and the prompt is the likely reason."""
    parts = FakeParts(failures={"a": failure("a", cause=UpstreamCause.FIRST_BYTE_TIMEOUT)})
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
async def test_without_token_ids_a_request_is_routed_by_its_text(cause: DegradedCause) -> None:
    """In chunks under a root of their own; counted as degraded, and told to its sidecar."""
    text = "Once upon a time. " * 20
    call = make_call(prompt=TextPrompt(texts=(text,)))
    parts = FakeParts(call=call, token_error=TokensUnknown(cause, "no"))
    record = await parts.routed()
    root = block_hash.approximate_root(model_scope="m", block_size_tokens=16)
    hashes = block_hash.chain(root, text.encode(), 16)
    assert (parts.lookups, parts.prompt_tokens) == ([hashes], [90])
    assert (record.outcome, record.degraded, record.degraded_cause) == ("completed", True, cause)
    assert (record.approximate, record.hit_tokens) == (True, 16)
    assert parts.computed_ == [(True, hashes)]


async def test_what_only_the_engine_can_tokenize_is_no_degradation() -> None:
    """Pictures are looked up by their text and what they are; an error tells nothing."""
    parts = FakeParts(call=make_call(prompt=OpaquePrompt(pieces=("user", "x" * 200))))
    record = await parts.routed()
    assert (record.degraded, record.approximate, len(parts.lookups[0])) == (False, True, 3 * 8)
    parts = FakeParts(call=parts.call, failures=dict.fromkeys("abc", 400))
    await parts.routed()
    assert parts.computed_ == []


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
        ({"call": make_call(asked_instances="a")}, RequestInvalid, "--allow_instance_choice"),
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


@pytest.mark.parametrize(("canonical", "blocks"), [(16, 6), (64, 1)])
async def test_a_plain_answer_awaits_its_last_full_block(canonical: int, blocks: int) -> None:
    """Each attempt on its own booking; nobody says that the prefill is over before the sidecar."""
    call = make_call(stream=False)
    parts = FakeParts(call=call, failures={"a": failure("a")}, block_size_tokens=canonical)
    await parts.routed()
    root = block_hash.root(model_scope="m", block_size_tokens=canonical)
    hashes = block_hash.chain(root, block_hash.pack_tokens(IDS), canonical)
    awaited = hashes[8 * (blocks - 1) : 8 * blocks]
    assert parts.awaited_ == [(booking, awaited) for booking in parts.booked]
    assert (len(parts.booked), parts.prefilled_) == (2, [])


SHORT = block_hash.pack_tokens(IDS[:15])
FIRST, LAST = block_hash.pack_tokens(IDS[:32]), block_hash.pack_tokens(IDS[32:64])


async def test_less_than_a_block_is_soon_computed() -> None:
    """Nothing is awaited: by the time that a sidecar could tell, it is computed anyway."""
    parts = FakeParts(call=make_call(stream=False, prompt=TokenPrompt(packed=(SHORT,))))
    await parts.routed()
    await until_equal(1, lambda: len(parts.prefilled_))
    assert parts.awaited_ == []


@pytest.mark.parametrize("stream", [False, True])
async def test_of_several_prompts_the_last_one_tells(stream: bool) -> None:
    """Also of a stream, whose first byte comes when the first prompt is computed."""
    prompt = TokenPrompt(packed=(FIRST, LAST))
    parts = FakeParts(call=make_call(stream=stream, prompt=prompt, prompts_count=2))
    await parts.routed()
    root = block_hash.root(model_scope="m", block_size_tokens=16)
    assert [block for _, block in parts.awaited_] == [block_hash.chain(root, LAST, 16)[-8:]]
    assert parts.lookups == [block_hash.chain(root, FIRST, 16)]
    assert parts.prefilled_ == []


UNKNOWN = TokensUnknown(DegradedCause.TOKENIZER_UNAVAILABLE, "no")


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (UNKNOWN, {"body": b"x" * 64}),
        (None, {"reads_prefixes": False}),
        (None, {"prompt": TokenPrompt(packed=(SHORT,) * 2), "prompts_count": 2}),
    ],
)
async def test_where_no_block_tells_a_ticket_is_awaited(
    error: TokensUnknown | None, changes: dict[str, Any]
) -> None:
    """Of unknown tokens, of prompts computed all anew, of many short ones; a new one each time."""
    parts = FakeParts(call=make_call(stream=False, **changes), token_error=error)
    await parts.routed()
    await parts.routed()
    tickets = {block for _, block in parts.awaited_}
    assert [booking for booking, _ in parts.awaited_] == parts.booked
    assert len(tickets) == 2
    assert {len(ticket) for ticket in tickets} == {8}
    assert parts.prefilled_ == []
