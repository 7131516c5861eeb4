"""Laws of traces: reading back, tokens of blocks, reuse, scaling."""

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import replay
from loadgen.conversations import conversation_labels
from loadgen.slicing import (
    SliceSpec,
    ideal_hit_tokens,
    spread_equal_arrivals,
    summarise,
    take_slice,
)
from loadgen.tokens import PromptTokens, block_tokens
from loadgen.trace import TraceRow, read_trace, write_trace

BLOCK_SIZE_TOKENS = 4
PROMPTS = PromptTokens(vocabulary_tokens=500)


@st.composite
def block_rows(draw: st.DrawFn) -> TraceRow:
    """A row of few, often equal blocks, so that prefixes meet."""
    block_ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    last_tokens = draw(st.integers(1, BLOCK_SIZE_TOKENS))
    return TraceRow(
        arrival_s=draw(st.floats(0, 1e6)),
        prompt_tokens=(len(block_ids) - 1) * BLOCK_SIZE_TOKENS + last_tokens,
        output_tokens=draw(st.integers(1, 100)),
        block_ids=tuple(block_ids),
        block_size_tokens=BLOCK_SIZE_TOKENS,
        session_id=draw(st.none() | st.text(max_size=3)),
        turn=draw(st.none() | st.integers(0, 9)),
    )


@st.composite
def other_rows(draw: st.DrawFn) -> TraceRow:
    """A row with its own tokens or text."""
    token_ids = tuple(draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=5)))
    text = draw(st.none() | st.text())
    return TraceRow(
        arrival_s=draw(st.floats(0, 1e6)),
        prompt_tokens=len(token_ids),
        output_tokens=1,
        token_ids=token_ids if text is None else None,
        text=text,
    )


def _by_arrival(rows: Sequence[TraceRow]) -> list[TraceRow]:
    return sorted(rows, key=lambda row: row.arrival_s)


def _unlabelled(rows: Sequence[TraceRow]) -> list[TraceRow]:
    return [
        TraceRow(
            arrival_s=row.arrival_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            block_ids=row.block_ids,
            block_size_tokens=row.block_size_tokens,
        )
        for row in _by_arrival(rows)
    ]


ROWS = st.lists(block_rows(), min_size=1, max_size=12)


@given(
    rows=st.lists(block_rows() | other_rows(), min_size=1, max_size=5),
    suffix=st.sampled_from((".jsonl", ".jsonl.gz")),
)
def test_written_rows_read_back_equal(rows: list[TraceRow], suffix: str) -> None:
    """Write, read: the same rows in order of arrival, none skipped."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"t{suffix}"
        write_trace(path, rows)
        trace = read_trace(path)
    assert (tuple(_by_arrival(rows)), 0) == (trace.rows, trace.skipped_rows_count)


@given(rows=st.lists(block_rows(), min_size=1, max_size=5))
def test_mooncake_rows_mean_the_same_as_ours(rows: list[TraceRow]) -> None:
    """The same requests written in either format differ in nothing but the block size."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "t.jsonl"
        lines = [
            {
                "timestamp": int(row.arrival_s) * 1000,
                "input_length": 512 * len(row.block_ids),
                "output_length": row.output_tokens,
                "hash_ids": row.block_ids,
            }
            for row in rows
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        read = read_trace(path).rows
    expected = [
        (int(row.arrival_s), row.output_tokens, row.block_ids)
        for row in sorted(rows, key=lambda row: int(row.arrival_s))
    ]
    assert expected == [(row.arrival_s, row.output_tokens, row.block_ids) for row in read]


@given(
    ids=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_equal_ids_give_equal_blocks_and_unequal_ids_unequal_ones(
    ids: list[int], seed: int
) -> None:
    """With 32 tokens of 1,000 two blocks coincide by chance once in 10^96."""
    blocks = block_tokens(ids, block_size_tokens=32, vocabulary_tokens=1000, seed=seed)
    texts = [block.tobytes() for block in blocks]
    assert [[a == b for b in ids] for a in ids] == [[a == b for b in texts] for a in texts]
    assert int(blocks.max()) < 1000


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    cut=st.floats(0, 1),
    size=st.integers(1, 40),
)
def test_shorter_prompt_is_a_prefix_of_the_longer(ids: list[int], cut: float, size: int) -> None:
    """Wherever a prompt ends, inside a block or at its edge, longer ones begin with it."""
    longer = PROMPTS.token_ids(ids, prompt_tokens=len(ids) * size, block_size_tokens=size)
    tokens = max(1, int(cut * len(longer)))
    blocks = ids[: -(-tokens // size)]
    shorter = PROMPTS.token_ids(blocks, prompt_tokens=tokens, block_size_tokens=size)
    assert longer[:tokens].tolist() == shorter.tolist()
    text = PROMPTS.json_text(blocks, prompt_tokens=tokens, block_size_tokens=size)
    assert shorter.tolist() == json.loads(text)


def _naive_hit_tokens(rows: Sequence[TraceRow], engine_block: int) -> list[int]:
    """The longest common prefix of real tokens with any earlier prompt, under the last-token rule.

    Of the large vocabulary no two of the few ids begin with the same token by chance.
    """
    earlier: list[np.ndarray] = []
    hits = []
    for row in rows:
        blocks = block_tokens(
            row.block_ids, block_size_tokens=BLOCK_SIZE_TOKENS, vocabulary_tokens=1 << 20
        )
        tokens = blocks.reshape(-1)[: row.prompt_tokens]
        longest = 0
        for other in earlier:
            length = min(len(tokens), len(other))
            different = np.flatnonzero(tokens[:length] != other[:length])
            longest = max(longest, int(different[0]) if len(different) else length)
        hits.append(min(longest, len(tokens) - 1) // engine_block * engine_block)
        earlier.append(tokens)
    return hits


@given(rows=ROWS, engine_block=st.sampled_from((1, 2, 3, 4, 16)))
def test_ideal_hits_equal_those_of_the_real_tokens(rows: list[TraceRow], engine_block: int) -> None:
    """Counting over block ids and comparing every pair of token sequences agree exactly."""
    hits = ideal_hit_tokens(rows, engine_block_size_tokens=engine_block)
    assert _naive_hit_tokens(rows, engine_block) == list(hits)


@given(rows=ROWS, factor=st.sampled_from((0.25, 0.5, 2.0, 3.0)))
def test_length_factor_keeps_who_shares_full_blocks(rows: list[TraceRow], factor: float) -> None:
    """Resized blocks keep ids and conversations; lengths follow within one token a prompt."""
    rows = _unlabelled(rows)
    kept = take_slice(rows, SliceSpec(prompt_length_factor=factor))
    assert [row.block_ids for row in rows] == [row.block_ids for row in kept]
    for before, after in zip(rows, kept, strict=True):
        assert abs(before.prompt_tokens * factor - after.prompt_tokens) <= 1


@given(
    gaps_s=st.lists(st.floats(0, 100), min_size=1, max_size=30),
    rate=st.floats(0.01, 1000),
)
def test_scaling_keeps_order_and_proportions(gaps_s: list[float], rate: float) -> None:
    """A schedule stretched to a rate rises as the trace does and keeps the ratio of its gaps."""
    arrivals_s = [0.0, *np.cumsum([*gaps_s, 1.0]).tolist()]
    schedule = replay(arrivals_s, request_rate=rate)
    assert list(schedule) == sorted(schedule)
    scale = schedule[-1] / arrivals_s[-1]
    assert np.allclose(np.array(arrivals_s) * scale, schedule)
    assert np.isclose((len(schedule) - 1) / rate, schedule[-1])


@given(steps=st.lists(st.integers(0, 4), min_size=1, max_size=30), seed=st.integers(0, 2**32))
def test_spreading_stays_within_the_step_and_in_order(steps: list[int], seed: int) -> None:
    """Rows rounded to 3 s stay in their 3 s, in order, and a seed repeats the spread."""
    rows = [
        TraceRow(arrival_s=3.0 * step, prompt_tokens=1, output_tokens=1, token_ids=(index,))
        for index, step in enumerate(sorted(steps))
    ]
    spread = spread_equal_arrivals(rows, seed=seed)
    times_s = [row.arrival_s for row in spread]
    assert times_s == sorted(times_s)
    assert [row.token_ids for row in rows] == [row.token_ids for row in spread]
    distinct = sorted({row.arrival_s for row in rows})
    step_s = min((b - a for a, b in pairwise(distinct)), default=0.0)
    assert all(0 <= b.arrival_s - a.arrival_s <= step_s for a, b in zip(rows, spread, strict=True))
    assert spread == spread_equal_arrivals(rows, seed=seed)


@given(rows=ROWS, first=st.integers(0, 3), count=st.integers(1, 12))
def test_whole_conversations_are_never_torn(rows: list[TraceRow], first: int, count: int) -> None:
    """Of every conversation of the trace a slice has all rows or none."""
    rows = [
        TraceRow(
            arrival_s=float(index),
            prompt_tokens=row.prompt_tokens,
            output_tokens=index + 1,  # names the row
            block_ids=row.block_ids,
            block_size_tokens=row.block_size_tokens,
        )
        for index, row in enumerate(rows)
    ]
    labels = conversation_labels(rows)
    spec = SliceSpec(first_row=min(first, len(rows) - 1), rows_count=count, requests_max=None)
    whole = {
        label
        for label in set(labels)
        if all(
            spec.first_row <= index < spec.first_row + count
            for index, other in enumerate(labels)
            if other == label
        )
    }
    expected = [index + 1 for index, label in enumerate(labels) if label in whole]
    if not expected:
        return
    assert expected == [row.output_tokens for row in take_slice(rows, spec)]


@given(rows=ROWS)
def test_labelling_a_slice_changes_none_of_its_conversations(rows: list[TraceRow]) -> None:
    """The labels written into a whole slice give the figures found without them."""
    plain = _unlabelled(rows)
    before, after = summarise(plain), summarise(take_slice(plain, SliceSpec()))
    assert (before.conversations_count, before.ideal_hit_ratio) == (
        after.conversations_count,
        after.ideal_hit_ratio,
    )
