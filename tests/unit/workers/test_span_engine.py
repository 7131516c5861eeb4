"""Laws of the fast engine that random workloads seldom meet; the others are property tests."""

import numpy as np
import pytest

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import EngineConfig, RequestTooLongError
from workers.simulated.fast.block_columns import BlockColumns
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.free_order import LeastRecentlyFreed
from workers.simulated.fast.request import ChainRequest

BLOCK_SIZE = 4
COST = CostModel(
    step_overhead_s=1.0,
    linear_s_per_token=0.0,
    weights_s=0.0,
    experts_s=0.0,
    expert_share=0.0,
    attention_s_per_pair=0.0,
    kv_read_s_per_token=0.0,
)


def make_engine(*, blocks: int = 64, max_num_seqs: int = 8) -> SpanEngine:
    """An engine with steps of one second."""
    return SpanEngine(
        EngineConfig(
            cost=COST,
            block_size_tokens=BLOCK_SIZE,
            capacity_blocks=blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            output_ids=(),
        )
    )


def make_request(
    name: str, *, prompt_tokens: int, output_tokens: int, blocks: list[int] | None = None
) -> ChainRequest:
    """A request whose blocks are 0, 1, 2, ... unless told."""
    count = (prompt_tokens + output_tokens - 1) // BLOCK_SIZE
    return ChainRequest(
        request_id=name,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=np.array(range(count) if blocks is None else blocks, np.int64),
    )


def decoding(engine: SpanEngine, request: ChainRequest) -> float:
    """Add it at 0 s to an idle engine and compute its prompt; returns the end of what follows."""
    engine.add(request, 0.0)
    engine.start(0.0)
    engine.finish()
    span = engine.start(1.0)
    assert span is not None
    return span.end_s


def test_a_lone_request_decodes_in_one_span() -> None:
    """Nothing can change between its first token and its last."""
    engine = make_engine()
    assert decoding(engine, make_request("a", prompt_tokens=4, output_tokens=100)) == 100.0
    assert [(r.request_id, f, last) for r, f, last in engine.finish()] == [("a", False, True)]
    assert engine.start(100.0) is None


@pytest.mark.parametrize(("arrives_s", "ends_s"), [(5.5, 6.0), (6.0, 6.0), (1.0, 2.0)])
def test_an_arrival_ends_the_span_with_the_step_in_progress(
    arrives_s: float, ends_s: float
) -> None:
    """At the very end of a step, it is that step; the one that begins is for the newcomer."""
    engine = make_engine()
    decoding(engine, make_request("a", prompt_tokens=4, output_tokens=100))
    engine.add(make_request("b", prompt_tokens=4, output_tokens=1), arrives_s)
    assert engine.ends_s == ends_s


@pytest.mark.parametrize(
    ("limits", "looks_s"), [({"max_num_seqs": 1}, 100.0), ({"blocks": 26}, 6.0)]
)
def test_who_cannot_be_admitted_ends_no_span(limits: dict[str, int], looks_s: float) -> None:
    """A full batch goes on; so does one with too few blocks left, after one look at the queue."""
    engine = make_engine(**limits)
    decoding(engine, make_request("a", prompt_tokens=4, output_tokens=100))
    late = [make_request(n, prompt_tokens=103, output_tokens=1, blocks=[99] * 25) for n in "bc"]
    engine.add(late[0], 5.5)
    assert engine.ends_s == looks_s
    if looks_s < 100.0:
        engine.finish()
        engine.start(looks_s)
    engine.add(late[1], 7.5)
    assert engine.ends_s == 100.0
    assert (engine.running_count, engine.waiting_count) == (1, 2)


def test_a_block_filled_while_decoding_admits_who_waits_for_it() -> None:
    """The waiting request lacks two blocks, then one: at 4 s, one second before the other ends."""
    engine = make_engine(blocks=3)
    decoding(engine, make_request("a", prompt_tokens=4, output_tokens=5))
    engine.add(make_request("b", prompt_tokens=9, output_tokens=1), 1.5)
    admitted = []
    while (now_s := engine.ends_s) is not None:
        engine.finish()
        span = engine.start(now_s)
        admitted += [(r.request_id, hit, now_s) for r, hit, _ in (span.admissions if span else [])]
    assert admitted == [("b", 8, 4.0)]


def test_a_request_that_could_never_finish_is_refused() -> None:
    """17 tokens need more than 4 blocks of 4; the message says both."""
    engine = make_engine(blocks=4)
    with pytest.raises(RequestTooLongError, match="17 tokens do not fit 4 blocks of 4 tokens"):
        engine.add(make_request("a", prompt_tokens=10, output_tokens=8), 0.0)


def test_of_several_blocks_with_one_content_the_eldest_is_hit() -> None:
    """When it is evicted, the next eldest takes its place, and then nobody."""
    pool = BlockColumns(4, LeastRecentlyFreed(4))
    pool.learn(8)
    chains = [pool.allocate(1)[0] for _ in range(3)]
    for chain in chains:
        pool.store(chain, np.array([7]))
    hits = []
    for chain in chains:
        hits.append(pool.match(np.array([7])).tolist())
        pool.release(chain)
        pool.allocate(pool.free_count)
    assert hits == [[0], [1], [2]]
    assert pool.match(np.array([7])).tolist() == []
