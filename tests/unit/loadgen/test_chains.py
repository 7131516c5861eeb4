"""Rows of a trace as requests of the fast engine, its event loop, and who holds what."""

import heapq
from collections.abc import Callable

import numpy as np
import pytest

from loadgen.simulation.chain_holders import ChainHolders
from loadgen.simulation.chains import chain_requests
from loadgen.simulation.span_driver import SpanDriver
from loadgen.trace import TraceRow
from workers.simulated.cost_model import load_profile
from workers.simulated.engine import EngineConfig
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.span import BlockChanges


def make_row(block_ids: tuple[int, ...], prompt_tokens: int, output_tokens: int = 1) -> TraceRow:
    """A row with blocks of 8 tokens."""
    return TraceRow(
        arrival_s=0.0,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_ids=block_ids,
        block_size_tokens=8,
    )


def test_equal_trace_blocks_become_equal_blocks_and_answers_nobodys() -> None:
    """Of a partly filled trace block, the full engine blocks count; identities are small.

    The same trace block behind another one is another block.
    """
    rows = [make_row((70, 90), 16, 9), make_row((70, 90), 13), make_row((90, 90), 16, 9)]
    requests = chain_requests(rows, block_size_tokens=4)
    assert [request.blocks.tolist() for request in requests] == [
        [0, 1, 2, 3, 10, 11],
        [0, 1, 2],
        [4, 5, 6, 7, 8, 9],
    ]


def test_an_answer_that_a_later_prompt_continues_is_in_that_prompt() -> None:
    """The engine that gave it then holds it; of two continuations the first decides.

    A row that does not begin with the earlier prompt continues nothing.
    """
    first = make_row((1, 2), 12, 9)  # a half filled block, whose id changes when it is filled
    second, branch, other = make_row((1, 3, 4), 24), make_row((1, 5, 6), 24), make_row((7,), 8)
    requests = chain_requests(
        [first, second, branch, other], block_size_tokens=4, previous=[None, 0, 0, 0]
    )
    asked, continued, branched, apart = (request.blocks.tolist() for request in requests)
    assert asked == continued[: (12 + 9 - 1) // 4]
    assert asked[:2] == branched[:2]
    assert not set(asked[2:]) & set(branched)
    assert not set(asked) & set(apart)


@pytest.mark.parametrize(
    ("row", "size", "message"),
    [
        (make_row((1,), 8), 3, "blocks of 8 tokens cannot be cut into blocks of 3"),
        (
            TraceRow(arrival_s=0, prompt_tokens=1, output_tokens=1, token_ids=(1,)),
            4,
            "row 0 has no block ids",
        ),
    ],
)
def test_rows_that_cannot_be_cut_are_named(row: TraceRow, size: int, message: str) -> None:
    """The message says which row and why."""
    with pytest.raises(ValueError, match=message):
        chain_requests([row], block_size_tokens=size)


def test_a_driven_engine_ends_each_request_once_and_in_time() -> None:
    """The second arrives while the first decodes: the end asked for then is passed over."""
    due: list[tuple[float, int, Callable[[], None]]] = []
    seen: list[tuple[str, str, float]] = []

    def at(when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(due, (when_s, len(due), action))

    config = EngineConfig(
        cost=load_profile("h20-qwen3-30b-a3b").cost,
        block_size_tokens=4,
        capacity_blocks=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        output_ids=(),
    )
    driver = SpanDriver(
        SpanEngine(config),
        at,
        admitted=lambda those, now_s: seen.extend(
            ("admitted", request.request_id, now_s) for request, *_ in those
        ),
        reached=lambda those, now_s: seen.extend(
            ("first" if first else "last", request.request_id, now_s) for request, first, _ in those
        ),
    )
    requests = chain_requests([make_row((1,), 8, 40), make_row((2,), 8, 2)], block_size_tokens=4)
    at(0.0, lambda: driver.add(requests[0], 0.0))
    at(0.1, lambda: driver.add(requests[1], 0.1))
    while due:
        heapq.heappop(due)[2]()
    names = [(what, who) for what, who, _ in seen]
    assert names == [
        ("admitted", "0"),
        ("first", "0"),
        ("admitted", "1"),
        ("first", "1"),
        ("last", "1"),
        ("last", "0"),
    ]
    times = [when_s for *_, when_s in seen]
    assert sorted(times) == times
    assert 0.1 < times[2] < 0.11


def test_a_block_is_held_until_it_is_evicted_as_often_as_stored() -> None:
    """Depths count leading blocks, slot by slot; a hole ends the count."""
    holders = ChainHolders(3, 10)
    stored = [3, 4, 5, 4, 9]
    for slot, evicted in [(0, [4]), (1, [4, 9, 4])]:
        signed = np.array([*stored, *(~identity for identity in evicted)])
        holders.apply(slot, [BlockChanges(np.zeros(len(signed)), signed)])
    holders.apply(2, [BlockChanges(np.zeros(1), np.array([4]))])
    assert holders.depths(np.array([3, 4, 5])).tolist() == [3, 1, 0]
    holders.apply(0, [BlockChanges(np.zeros(1), np.array([~3]))])
    assert holders.depths(np.array([3, 4, 5])).tolist() == [0, 1, 0]
    assert holders.depths(np.array([], np.int64)).tolist() == [0, 0, 0]
