"""Slices of a trace and their figures."""

from collections.abc import Callable

import pytest

from loadgen.conversations import previous_turns
from loadgen.errors import SliceError
from loadgen.slicing import (
    SliceSpec,
    ideal_hit_ratio,
    ideal_hit_tokens,
    spread_equal_arrivals,
    summarise,
    summary_lines,
    take_slice,
)
from loadgen.trace import TraceRow

MakeRow = Callable[..., TraceRow]


def test_follow_up_continues_the_latest_row_it_extends(make_row: MakeRow) -> None:
    """Of two rows that a prompt extends, the later one is its previous turn."""
    rows = [make_row(0, 1), make_row(0, 1, 2), make_row(0, 9), make_row(0, 1, 2, 3)]
    assert previous_turns(rows) == (None, 0, None, 1)


def test_common_first_block_makes_no_conversation(make_row: MakeRow) -> None:
    """A block that every row begins with is a system prompt, not a shared past."""
    rows = [make_row(0), make_row(0, 1), make_row(0, 2)]
    assert previous_turns(rows) == (None, None, None)


def test_partly_filled_block_is_no_part_of_what_is_extended(make_row: MakeRow) -> None:
    """Only full blocks must recur: the last, partly filled one changes its id when it fills."""
    rows = [make_row(1, 2, prompt_tokens=6), make_row(1, 3, 4), make_row(5)]
    assert previous_turns(rows) == (None, 0, None)


def test_session_labels_outrank_blocks(make_row: MakeRow) -> None:
    """Labelled rows follow their label whatever their blocks say."""
    rows = [
        make_row(1, session_id="a"),
        make_row(1, 2, session_id="b"),
        make_row(9, session_id="a"),
    ]
    assert previous_turns(rows) == (None, None, 0)


def test_whole_conversations_leave_out_those_that_reach_outside(make_row: MakeRow) -> None:
    """A conversation with a turn beyond the stretch is partial, so none of it is kept."""
    rows = [
        make_row(1, arrival_s=0),
        make_row(2, arrival_s=1),
        make_row(2, 3, arrival_s=2),
        make_row(1, 4, arrival_s=3),
    ]
    kept = take_slice(rows, SliceSpec(rows_count=3))
    assert [row.block_ids for row in kept] == [(2,), (2, 3)]


def test_slice_is_labelled_and_starts_at_zero(make_row: MakeRow) -> None:
    """Sessions and turns found in the trace are written into the rows."""
    rows = [make_row(1, arrival_s=5), make_row(7, arrival_s=6), make_row(1, 2, arrival_s=8)]
    kept = take_slice(rows, SliceSpec())
    labels = [(row.arrival_s, row.session_id, row.turn) for row in kept]
    first, other = "conversation-0", "conversation-1"
    assert [(0, first, 0), (1, other, 0), (3, first, 1)] == labels


def test_long_prompt_takes_its_conversation_with_it(make_row: MakeRow) -> None:
    """Whole means whole: a turn over the cap removes the turns before it."""
    rows = [make_row(1, arrival_s=0), make_row(5, arrival_s=1), make_row(1, 2, 3, arrival_s=2)]
    kept = take_slice(rows, SliceSpec(prompt_tokens_max=8))
    assert [row.block_ids for row in kept] == [(5,)]


def test_without_whole_conversations_rows_are_cut_one_by_one(make_row: MakeRow) -> None:
    """Cap and count then concern rows."""
    rows = [make_row(1, arrival_s=0), make_row(1, 2, 3, arrival_s=1), make_row(9, arrival_s=2)]
    spec = SliceSpec(whole_conversations=False, prompt_tokens_max=8, requests_max=1)
    assert [row.block_ids for row in take_slice(rows, spec)] == [(1,)]


def test_draw_respects_the_bound_and_the_seed(make_row: MakeRow) -> None:
    """At most requests_max rows, equal for equal seeds, different for another."""
    rows = [make_row(n, arrival_s=n) for n in range(100)]
    drawn = [take_slice(rows, SliceSpec(requests_max=10, seed=seed)) for seed in (1, 1, 2)]
    assert len(drawn[0]) == 10
    assert drawn[0] == drawn[1] != drawn[2]


def test_turns_min_keeps_only_longer_conversations(make_row: MakeRow) -> None:
    """Single requests go when two turns are asked for."""
    rows = [make_row(1, arrival_s=0), make_row(5, arrival_s=1), make_row(1, 2, arrival_s=2)]
    kept = take_slice(rows, SliceSpec(turns_min=2))
    assert [row.block_ids for row in kept] == [(1,), (1, 2)]


def test_nothing_left_says_what_to_change(make_row: MakeRow) -> None:
    """An empty slice is an error with the options in its message."""
    with pytest.raises(SliceError, match="raise prompt_tokens_max"):
        take_slice([make_row(1, 2)], SliceSpec(prompt_tokens_max=3))


def test_stretch_beyond_the_trace_says_how_long_it_is(make_row: MakeRow) -> None:
    """The message has the number of rows."""
    with pytest.raises(SliceError, match="the trace has 1 rows"):
        take_slice([make_row(1)], SliceSpec(first_row=5))


def test_length_factor_resizes_blocks_and_keeps_reuse(make_row: MakeRow) -> None:
    """Half-size blocks halve the prompt; the last, partly filled block is halved too."""
    row = make_row(1, 2, prompt_tokens=6, output_tokens=10)
    spec = SliceSpec(prompt_length_factor=0.5, output_length_factor=0.3)
    (kept,) = take_slice([row], spec)
    assert (
        kept.prompt_tokens,
        kept.block_size_tokens,
        kept.block_ids,
        kept.output_tokens,
    ) == (3, 2, (1, 2), 3)


def test_length_factor_refuses_prompts_without_blocks() -> None:
    """Text cannot be stretched."""
    row = TraceRow(arrival_s=0, prompt_tokens=5, output_tokens=1, text="hello")
    with pytest.raises(SliceError, match="needs rows with block ids"):
        take_slice([row], SliceSpec(prompt_length_factor=2))


def test_equal_arrivals_spread_within_their_step_in_order(make_row: MakeRow) -> None:
    """Rows of one 3 s step fall into that step, none passes another, and a seed repeats it."""
    rows = [make_row(n, arrival_s=3.0 * (n // 4)) for n in range(8)]
    spread = spread_equal_arrivals(rows, seed=1)
    times_s = [row.arrival_s for row in spread]
    assert [n for (n,) in (row.block_ids for row in spread)] == list(range(8))
    assert times_s == sorted(times_s)
    assert len(set(times_s)) == 8
    assert [at // 3 for at in times_s] == [0] * 4 + [1] * 4
    assert spread == spread_equal_arrivals(rows, seed=1)


def test_distinct_arrivals_stay_as_they_are(make_row: MakeRow) -> None:
    """Nothing is spread that is not rounded."""
    rows = (make_row(1, arrival_s=0), make_row(2, arrival_s=0.5))
    assert rows == spread_equal_arrivals(rows, seed=1)


def test_repeated_prompt_hits_all_but_its_last_engine_block(make_row: MakeRow) -> None:
    """The last token is always recomputed, so an aligned repeat loses one engine block."""
    rows = [make_row(1, 2), make_row(1, 2)]
    assert ideal_hit_tokens(rows, engine_block_size_tokens=2) == (0, 6)
    assert ideal_hit_tokens(rows, engine_block_size_tokens=1) == (0, 7)


def test_hit_ends_at_the_first_unseen_block(make_row: MakeRow) -> None:
    """A known block behind an unknown one is no prefix."""
    rows = [make_row(1, 2, 3), make_row(1, 9, 3)]
    assert ideal_hit_tokens(rows, engine_block_size_tokens=1) == (0, 4)


def test_growing_block_hits_as_far_as_it_was_filled(make_row: MakeRow) -> None:
    """A block seen with 2 of 4 tokens gives 2 hit tokens when it comes back full."""
    rows = [make_row(1, 2, prompt_tokens=6), make_row(1, 2, 3)]
    assert ideal_hit_tokens(rows, engine_block_size_tokens=1) == (0, 6)


def test_ideal_hit_ratio_is_weighted_by_tokens(make_row: MakeRow) -> None:
    """Sum over sum, never a mean of ratios."""
    rows = [make_row(1), make_row(1, 2, 3)]
    assert ideal_hit_ratio(rows, engine_block_size_tokens=4) == 4 / 16


def test_summary_counts_conversations_and_gaps(make_row: MakeRow) -> None:
    """The figures of a trace with one conversation of two turns and one of one."""
    rows = [make_row(1, arrival_s=0), make_row(5, arrival_s=4), make_row(1, 2, arrival_s=10)]
    summary = summarise(rows)
    assert (
        summary.requests_count,
        summary.conversations_count,
        summary.span_s,
        summary.request_rate,
    ) == (3, 2, 10.0, 0.2)
    assert (1.5, pytest.approx(2 / 3), 10.0) == (
        summary.turns_mean,
        summary.multi_turn_ratio,
        summary.turn_gap_p50_s,
    )
    assert "3 over 10 s" in summary_lines(summary)["requests"]
