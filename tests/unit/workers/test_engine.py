"""The engine's scheduling laws, one by one."""

from collections.abc import Sequence

import pytest

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig, RequestTooLongError
from workers.simulated.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from workers.simulated.request import Request, pack_tokens, unpack_tokens
from workers.simulated.step import Step, StepOutput

COST = CostModel(
    step_overhead_s=1.0,
    linear_s_per_token=0.0,
    weights_s=0.0,
    experts_s=0.0,
    expert_share=0.0,
    attention_s_per_pair=0.0,
    kv_read_s_per_token=0.0,
)


def make_engine(
    *, blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 64
) -> Engine:
    """An engine with blocks of 4 tokens and steps of one second."""
    config = EngineConfig(
        cost=COST,
        block_size_tokens=4,
        capacity_blocks=blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_ids=range(1000, 1100),
    )
    return Engine(config)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    output_tokens: int = 1,
    salt: str | None = None,
    adapter: str | None = None,
) -> Request:
    """A request with everything else at its default."""
    packed = pack_tokens(prompt)
    return Request(
        request_id=name,
        packed_prompt=packed,
        output_tokens=output_tokens,
        salt=salt,
        adapter=adapter,
    )


def step(engine: Engine) -> tuple[Step, StepOutput]:
    """One step, which there must be."""
    started = engine.start_step()
    assert started is not None
    return started, engine.finish_step(started)


def drain(engine: Engine) -> list[KvEvent]:
    """Step until idle; all events."""
    events: list[KvEvent] = []
    while (started := engine.start_step()) is not None:
        events += engine.finish_step(started).events
    return events


def hit_tokens(engine: Engine, request: Request) -> int:
    """Run a request alone; how much of its prompt was resident."""
    engine.add(request)
    started, _ = step(engine)
    drain(engine)
    (admission,) = started.admissions
    return admission.hit_tokens


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(16, 12), (17, 16), (19, 16), (4, 0)])
def test_last_token_is_always_recomputed(prompt_tokens: int, expected: int) -> None:
    """A repeat hits prompt_tokens - 1, floored to whole blocks."""
    engine = make_engine()
    hit_tokens(engine, make_request("first", range(prompt_tokens)))
    assert expected == hit_tokens(engine, make_request("again", range(prompt_tokens)))


def test_prefill_is_chunked_by_the_token_budget() -> None:
    """A prompt of 20 tokens under a budget of 8 takes three steps to its first token."""
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("long", range(20)))
    counts = []
    while (started := engine.start_step()) is not None:
        output = engine.finish_step(started)
        counts.append((started.batch[0][1], len(output.tokens)))
    assert counts == [(8, 0), (8, 0), (4, 1)]


def test_blocks_of_an_unfinished_prefill_can_be_hit() -> None:
    """A second request hits what the first has prefilled so far."""
    engine = make_engine(max_num_batched_tokens=12)
    engine.add(make_request("first", range(40)))
    step(engine)
    engine.add(make_request("second", [*range(12), 99]))
    admissions = []
    while not admissions:
        started, _ = step(engine)
        admissions = started.admissions
    assert admissions[0].hit_tokens == 12


def test_running_requests_come_before_waiting_ones() -> None:
    """Decoding takes its token from the budget before a new prompt gets the rest."""
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("decoding", range(4), output_tokens=5))
    step(engine)
    engine.add(make_request("new", range(50, 70)))
    started, _ = step(engine)
    batch = [(active.request.request_id, count) for active, count in started.batch]
    assert batch == [("decoding", 1), ("new", 7)]


def test_sequence_limit_holds_back_waiting_requests() -> None:
    """No more than max_num_seqs requests are in the batch."""
    engine = make_engine(max_num_seqs=2)
    for number in range(3):
        engine.add(make_request(str(number), [number], output_tokens=3))
    step(engine)
    assert (engine.running_count, engine.waiting_count) == (2, 1)


def test_decoded_blocks_are_stored_one_by_one_with_their_parent() -> None:
    """A block that fills while decoding is an event of its own, behind the block before it."""
    engine = make_engine()
    engine.add(make_request("talker", range(4), output_tokens=9))
    stored = [event for event in drain(engine) if isinstance(event, BlocksStored)]
    assert [len(event.block_hashes) for event in stored] == [1, 1, 1]
    assert [None, *(event.block_hashes[0] for event in stored[:-1])] == [
        event.parent_block_hash for event in stored
    ]


def test_next_turn_hits_the_blocks_its_last_answer_filled() -> None:
    """Prompt plus answer, sent again, is resident but for the last generated token's block."""
    engine = make_engine()
    engine.add(make_request("turn 0", range(6), output_tokens=8))
    stored = [event for event in drain(engine) if isinstance(event, BlocksStored)]
    tokens = [token for event in stored for token in unpack_tokens(event.packed_tokens)]
    assert len(tokens) == 12
    assert hit_tokens(engine, make_request("turn 1", [*tokens, 1, 2, 3])) == 12


def test_same_content_computed_twice_is_stored_and_removed_twice() -> None:
    """Stored and removed are reference counts: each copy of a block has its own events."""
    engine = make_engine(blocks=8)
    for name in ("a", "b"):
        engine.add(make_request(name, range(8)))
    events = drain(engine)
    hashes = [h for event in events if isinstance(event, BlocksStored) for h in event.block_hashes]
    # The second request hits block 0; block 1 holds its last token, so it computes it again.
    assert [hashes.count(h) for h in dict.fromkeys(hashes)] == [1, 2]
    engine.add(make_request("evictor", range(100, 132)))
    removed = [
        h for event in drain(engine) if isinstance(event, BlocksRemoved) for h in event.block_hashes
    ]
    assert sorted(hashes) == sorted(removed)


def test_tail_of_a_chain_is_evicted_first() -> None:
    """Making room for one block costs the end of the oldest chain, not its start."""
    engine = make_engine(blocks=4)
    hit_tokens(engine, make_request("old", range(16)))
    hit_tokens(engine, make_request("new", range(50, 54)))
    assert hit_tokens(engine, make_request("again", [*range(12), 99])) == 12


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_salt_and_adapter_make_disjoint_caches(field: str) -> None:
    """The same tokens under another salt or adapter are not a hit."""
    engine = make_engine()
    hit_tokens(engine, make_request("plain", range(20)))
    other = {field: "x"}
    assert hit_tokens(engine, make_request("other", range(20), **other)) == 0
    assert hit_tokens(engine, make_request("other again", range(20), **other)) == 16


def test_youngest_is_preempted_when_blocks_run_out_and_still_finishes() -> None:
    """Two growing requests that do not fit together finish one after the other."""
    engine = make_engine(blocks=5)
    engine.add(make_request("elder", range(8), output_tokens=10))
    engine.add(make_request("younger", range(50, 58), output_tokens=10))
    finished = []
    while (started := engine.start_step()) is not None:
        output = engine.finish_step(started)
        finished += [token.request.request_id for token in output.tokens if token.last]
    assert finished == ["elder", "younger"]
    assert engine.totals.preemption_count >= 1
    assert engine.pool.used_count == 0


def test_preemption_generates_no_token_twice() -> None:
    """Positions of a preempted request's tokens still count up by one."""
    engine = make_engine(blocks=5)
    engine.add(make_request("elder", range(8), output_tokens=10))
    engine.add(make_request("younger", range(50, 58), output_tokens=10))
    positions = []
    while (started := engine.start_step()) is not None:
        output = engine.finish_step(started)
        positions += [t.position for t in output.tokens if t.request.request_id == "younger"]
    assert positions == list(range(10))


def test_prefix_totals_count_a_preempted_request_once() -> None:
    """Queries and hits are those of first admissions."""
    engine = make_engine(blocks=5)
    engine.add(make_request("elder", range(8), output_tokens=10))
    engine.add(make_request("younger", range(50, 58), output_tokens=10))
    drain(engine)
    assert (engine.totals.prefix_queries_tokens, engine.totals.prefix_hits_tokens) == (16, 0)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_blocks_at_once(steps: int) -> None:
    """Waiting, prefilling or decoding: an aborted request holds nothing."""
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(make_request("gone", range(16), output_tokens=50))
    for _ in range(steps):
        step(engine)
    assert engine.abort("gone")
    assert (engine.pool.used_count, engine.start_step()) == (0, None)


def test_abort_between_start_and_finish_of_a_step_yields_no_token() -> None:
    """A request that leaves while its step runs gets nothing from it."""
    engine = make_engine()
    engine.add(make_request("gone", range(4)))
    started = engine.start_step()
    assert started is not None
    engine.abort("gone")
    assert engine.finish_step(started).tokens == []


def test_abort_of_an_unknown_request_is_refused() -> None:
    """Nothing happens when the request has already finished."""
    assert not make_engine().abort("nobody")


def test_reset_is_announced_with_the_next_step_only() -> None:
    """An idle engine keeps the event; the next request's step carries it first."""
    engine = make_engine()
    hit_tokens(engine, make_request("before", range(8)))
    assert engine.reset_prefix_cache()
    assert engine.start_step() is None
    engine.add(make_request("after", range(8)))
    _, output = step(engine)
    assert [type(event) for event in output.events] == [BlocksCleared, BlocksStored]


def test_reset_is_refused_while_blocks_are_held() -> None:
    """A running request keeps its cache."""
    engine = make_engine()
    engine.add(make_request("running", range(8), output_tokens=5))
    step(engine)
    assert not engine.reset_prefix_cache()


def test_request_that_cannot_fit_alone_is_refused() -> None:
    """It would wait forever otherwise."""
    engine = make_engine(blocks=2)
    with pytest.raises(RequestTooLongError, match="9 tokens do not fit 2 blocks of 4"):
        engine.add(make_request("huge", range(8), output_tokens=2))


def test_idle_engine_has_no_step() -> None:
    """Nothing to compute takes no time."""
    assert make_engine().start_step() is None
