"""Laws of the trace analysis, each against a naive twin that looks at every block."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.analysis.block_numbers import BlockNumbers, prefix_keys
from loadgen.analysis.caches import best_hits, latest_use_hits
from loadgen.analysis.distributions import distribution, exponential_fit
from loadgen.analysis.history import History, Requests
from loadgen.analysis.reuse import Reuses, find_reuses
from loadgen.analysis.working_set import working_set
from loadgen.conversations import conversation_labels
from loadgen.trace_row import TraceRow
from loadgen.workloads.options import ReadOptions

SIZE = 4
CAPACITIES = range(1, 13)
Path = tuple[int, ...]


def _row(at: int, ids: Sequence[int], rest: int, session: str | None) -> TraceRow:
    """A prompt of full blocks with these ids, and a partly filled one of `rest` tokens."""
    last = (99,) if rest or not ids else ()
    return TraceRow(
        arrival_s=float(at),
        prompt_tokens=max(1, len(ids) * SIZE + rest),
        output_tokens=1,
        block_ids=(*ids, *last),
        block_size_tokens=SIZE,
        session_id=session,
    )


def _rows(*, length: int = 5, count: int = 9, ids: int = 2) -> st.SearchStrategy[list[TraceRow]]:
    """Few ids, so prompts share beginnings; an id stands for a prefix only with its place."""
    row = st.builds(
        _row,
        st.integers(0, 20),
        st.lists(st.integers(0, ids), max_size=length),
        st.integers(0, SIZE - 1),
        st.sampled_from((None, None, "a", "b")),
    )
    return st.lists(row, min_size=1, max_size=count)


def _analysed(
    rows: Sequence[TraceRow], memory_bytes_max: int = 1 << 20
) -> tuple[Requests, list[list[int]], Reuses]:
    with History(ReadOptions(), memory_bytes_max=memory_bytes_max) as history:
        history.take(rows)
        requests = history.requests()
        paths = [path.tolist() for path in history.paths()]
        return requests, paths, find_reuses(requests, history.paths())


def _in_order(rows: Sequence[TraceRow]) -> list[TraceRow]:
    return sorted(rows, key=lambda row: row.arrival_s)


def _prefixes(rows: Sequence[TraceRow]) -> list[list[Path]]:
    """Every prompt's full blocks, each as everything up to it."""
    return [
        [row.full_blocks[: end + 1] for end in range(len(row.full_blocks))]
        for row in _in_order(rows)
    ]


def _hits_max(row: TraceRow) -> int:
    return (row.prompt_tokens - 1) // SIZE


def _leading(prompt: Sequence[Path], held: Sequence[Path] | frozenset[Path]) -> int:
    return next((n for n, block in enumerate(prompt) if block not in held), len(prompt))


@given(_rows())
def test_equal_numbers_are_equal_prefixes(rows: list[TraceRow]) -> None:
    """Rows in any order come back in order of arrival, their blocks named one to one.

    Also where they have waited in a file.
    """
    _, paths, _ = _analysed(rows, memory_bytes_max=64)
    names: dict[Path, int] = {}
    for prompt, path in zip(_prefixes(rows), paths, strict=True):
        assert len(prompt) == len(path)
        for block, number in zip(prompt, path, strict=True):
            assert names.setdefault(block, number) == number
    assert sorted(names.values()) == list(range(len(names)))


@given(st.lists(st.sets(st.integers(1, 1 << 62), max_size=3000), max_size=6))
def test_block_numbers_remember_every_key(batches: list[set[int]]) -> None:
    """The hash table is a dictionary, through growth and crowded slots."""
    numbers, twin = BlockNumbers(), dict[int, int]()
    for batch in [*batches, *batches]:
        keys = [key & ~0xFF0 for key in batch]  # so that many share a slot
        keys = list(dict.fromkeys(key or 1 for key in keys))
        expected = [twin.setdefault(key, len(twin)) for key in keys]
        assert expected == numbers.of(np.array(keys, dtype=np.uint64)).tolist()


def test_too_many_blocks_are_refused_with_what_to_do() -> None:
    """The table is bounded, and says which options narrow the trace."""
    with pytest.raises(ValueError, match="--rows_max"):
        BlockNumbers(blocks_max=2).of(prefix_keys(np.arange(3), SIZE))


def _latest_use_twin(rows: Sequence[TraceRow], capacity: int) -> int:
    """LRU block by block: the head of a prompt is on top, and what was there before is found."""
    stack: list[Path] = []
    hits = 0
    for row, prompt in zip(_in_order(rows), _prefixes(rows), strict=True):
        hits += min(_hits_max(row), _leading(prompt, stack))
        stack = [*prompt, *(block for block in stack if block not in prompt)][:capacity]
    return hits * SIZE


RETOUCHED = [_row(at, ids, 1, None) for at, ids in enumerate(([0, 1], [2], [0, 1], [2]))]
"""What was touched again lies above what was touched in between."""


@example(RETOUCHED)
@given(_rows())
def test_latest_use_hits_are_those_of_a_list(rows: list[TraceRow]) -> None:
    """The hits of LRU at every size, from one pass over runs, are those of plain simulations."""
    requests, _, reuses = _analysed(rows)
    found = latest_use_hits(requests, reuses, np.array(CAPACITIES) * SIZE)
    assert [_latest_use_twin(rows, capacity) for capacity in CAPACITIES] == found.tolist()


def _best_of_all(rows: Sequence[TraceRow], capacity: int) -> int:
    """The most hits of any choice of what to keep after each request, by trying every one."""
    states: dict[frozenset[Path], int] = {frozenset(): 0}
    for row, prompt in zip(_in_order(rows), _prefixes(rows), strict=True):
        after: dict[frozenset[Path], int] = {}
        for held, hits in states.items():
            now = hits + min(_hits_max(row), _leading(prompt, held))
            there = held | set(prompt)
            for kept in map(frozenset, combinations(there, min(capacity, len(there)))):
                after[kept] = max(after.get(kept, 0), now)
        states = after
    return max(states.values()) * SIZE


@given(_rows(length=2, count=5, ids=1), st.integers(1, 3))
def test_best_hits_cannot_be_beaten(rows: list[TraceRow], capacity: int) -> None:
    """No choice of what to evict finds more, and some choice finds as much."""
    requests, _, reuses = _analysed(rows)
    assert _best_of_all(rows, capacity) == best_hits(requests, reuses, capacity * SIZE)


def _best_twin(rows: Sequence[TraceRow], capacity: int) -> int:
    """Belady block by block: what is used again first stays, heads of prompts before tails.

    A use that does not count as a hit is none.
    """
    ordered, prompts, held, hits = _in_order(rows), _prefixes(rows), set[Path](), 0
    for place, (row, prompt) in enumerate(zip(ordered, prompts, strict=True)):
        hits += min(_hits_max(row), _leading(prompt, frozenset(held)))

        def next_use(block: Path, place: int = place) -> tuple[float, int]:
            uses = (use for use in range(place + 1, len(prompts)) if block in prompts[use])
            use = next(uses, None)
            counts = use is not None and len(block) <= _hits_max(ordered[use])
            return (float(use or 0) if counts else float("inf")), len(block)

        held = set(sorted(held | set(prompt), key=next_use)[:capacity])
    return hits * SIZE


@given(_rows())
def test_best_hits_are_those_of_beladys_rule(rows: list[TraceRow]) -> None:
    """Counting runs by their next user keeps what the rule, applied to every block, keeps."""
    requests, _, reuses = _analysed(rows)
    for capacity in CAPACITIES[::3]:
        assert _best_twin(rows, capacity) == best_hits(requests, reuses, capacity * SIZE)


def _each_reuse(prompts: Sequence[Sequence[Path]]) -> Iterator[tuple[int, int, int]]:
    last: dict[Path, int] = {}
    for reuser, prompt in enumerate(prompts):
        for place, block in enumerate(prompt):
            if block in last:
                yield last[block], reuser, place
            last[block] = reuser


@given(_rows())
def test_reuses_are_those_of_every_block(rows: list[TraceRow]) -> None:
    """Runs, touches and lifespans say of each block what looking at each block says."""
    requests, paths, reuses = _analysed(rows)
    prompts = _prefixes(rows)
    columns = (reuses.toucher, reuses.reuser, reuses.start, reuses.length)
    found = [
        (toucher, reuser, start + step)
        for toucher, reuser, start, length in zip(*(c.tolist() for c in columns), strict=True)
        for step in range(length)
    ]
    assert list(_each_reuse(prompts)) == found
    assert len(reuses.length) <= 2 * len(requests)
    for number in range(requests.distinct_blocks):
        users = [request for request, path in enumerate(paths) if number in path]
        assert reuses.touches[number] == len(users)
        assert (reuses.first_touch[number], reuses.last_touch[number]) == (users[0], users[-1])


@given(_rows())
def test_sessions_are_those_of_the_load_generator(rows: list[TraceRow]) -> None:
    """Unlabelled requests continue the ones that `loadgen.conversations` finds."""
    _, _, reuses = _analysed(rows)
    labels = conversation_labels(_in_order(rows))
    pairs = set(zip(labels, reuses.session.tolist(), strict=True))
    assert len(pairs) == len(set(labels)) == len(set(reuses.session.tolist()))


@given(_rows())
def test_working_set_is_that_of_every_block(rows: list[TraceRow]) -> None:
    """Touched, seen and wanted tokens of each part of the time, by sets of blocks."""
    requests, _, reuses = _analysed(rows)
    prompts, times = _prefixes(rows), [row.arrival_s for row in _in_order(rows)]
    start = times[0]
    times = [time - start for time in times]
    begin = -1.0
    for moment in working_set(requests, reuses, 4):
        inside = [p for p, t in zip(prompts, times, strict=True) if begin < t <= moment.end_s]
        until = {b for p, t in zip(prompts, times, strict=True) if t <= moment.end_s for b in p}
        later = {b for p, t in zip(prompts, times, strict=True) if t > moment.end_s for b in p}
        assert moment.touched_tokens == SIZE * len({b for prompt in inside for b in prompt})
        assert moment.seen_tokens == SIZE * len(until)
        assert moment.wanted_tokens == SIZE * len(until & later)
        begin = moment.end_s


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 5)), max_size=60),
)
def test_distribution_counts_values_as_often_as_they_say(pairs: list[tuple[float, int]]) -> None:
    """A weight is so many equal values."""
    values = np.array([value for value, _ in pairs])
    weights = np.array([weight for _, weight in pairs], dtype=np.int64)
    found = distribution(values, weights)
    repeated = distribution(np.repeat(values, weights))
    assert found.count == repeated.count
    assert found.percentiles == repeated.percentiles
    assert found.mean == pytest.approx(repeated.mean)


def test_an_exponential_is_recognised_and_a_constant_is_not() -> None:
    """The fit of exponential gaps has their rate and is close; that of equal gaps is far off."""
    shares = (np.arange(4000) + 0.5) / 4000
    gaps_s = 0.3 - np.log1p(-shares) / 0.02
    ones = np.ones(4000, np.int64)
    fit = exponential_fit(np.concatenate((gaps_s, [0.1] * 1000)), np.ones(5000, np.int64))
    assert fit is not None
    assert fit.rate_per_s == pytest.approx(0.02, rel=0.01)
    assert fit.fitted_ratio == pytest.approx(0.8)
    assert fit.ks_distance < 0.005
    assert fit.r_squared > 0.999
    constant = exponential_fit(np.full(4000, 60.0), ones)
    assert constant is not None
    assert constant.ks_distance == pytest.approx(1 - np.exp(-1), abs=0.01)
    assert exponential_fit(np.full(10, 0.1), ones[:10]) is None


def test_a_row_without_blocks_has_those_of_its_text_and_tokens() -> None:
    """Equal beginnings of texts, and of token ids, are equal blocks."""
    options = ReadOptions(block_size_tokens=2)
    base = {"arrival_s": 0.0, "output_tokens": 1}
    tokens = TraceRow(**base, prompt_tokens=5, token_ids=(1, 2, 3, 4, 5))
    text = TraceRow(**base, prompt_tokens=4, text="abcdefgh" * 2)
    rows = [tokens, replace(tokens, token_ids=(1, 2, 3, 5, 5)), text, text]
    with History(options) as history:
        history.take(rows)
        history.requests()
        paths = [path.tolist() for path in history.paths()]
    assert paths == [[0, 1], [0, 2], [3, 4], [3, 4]]
