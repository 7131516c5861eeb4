"""The generated workload: its statistics, and that a seed repeats it."""

from itertools import pairwise

import numpy as np
import pytest

from loadgen.generate import ChatWorkload, generate
from loadgen.slicing import TraceSummary, summarise
from loadgen.trace import TraceRow


@pytest.fixture(scope="module")
def rows() -> tuple[TraceRow, ...]:
    """A workload long enough (about 20 minutes) for its turns to show."""
    return generate(ChatWorkload(requests_count=4000, seed=5))


@pytest.fixture(scope="module")
def summary(rows: tuple[TraceRow, ...]) -> TraceSummary:
    """Its figures."""
    return summarise(rows)


def test_ideal_hit_ratio_is_that_of_chat_traffic(summary: TraceSummary) -> None:
    """54 % to 62 % in KVCache in the Wild, with 4 points of slack for the seed."""
    assert 0.50 <= summary.ideal_hit_ratio <= 0.66


def test_prompt_lengths_are_near_the_mooncake_trace(summary: TraceSummary) -> None:
    """P50 7,181 and P90 27,809 within 25 %; P10 969 within a factor of 3 (long system prompts)."""
    p10, p50, p90, _ = summary.prompt_tokens_quantiles
    assert 969 / 3 <= p10 <= 969 * 3
    assert 7181 * 0.75 <= p50 <= 7181 * 1.25
    assert 27_809 * 0.75 <= p90 <= 27_809 * 1.25


def test_answer_lengths_are_near_the_mooncake_trace(summary: TraceSummary) -> None:
    """P10 24, P50 355, P90 604, each within 25 %."""
    for expected, actual in zip((24, 355, 604), summary.output_tokens_quantiles, strict=False):
        assert expected * 0.75 <= actual <= expected * 1.25


def test_turns_have_the_mean_and_tail_of_the_mooncake_trace(
    rows: tuple[TraceRow, ...], summary: TraceSummary
) -> None:
    """1.5 turns on average (within 0.25), median 1, P99 near 7, some beyond 10."""
    _, turns = np.unique([row.session_id for row in rows], return_counts=True)
    assert 1.25 <= summary.turns_mean <= 1.75
    assert np.median(turns) == 1
    assert 5 <= np.percentile(turns, 99) <= 10
    assert turns.max() > 10


def test_gap_between_turns_is_that_of_people(summary: TraceSummary) -> None:
    """Median 123 s in the Mooncake trace, within 25 %."""
    assert summary.turn_gap_p50_s is not None
    assert 123 * 0.75 <= summary.turn_gap_p50_s <= 123 * 1.25


def test_sessions_arrive_as_a_poisson_process(rows: tuple[TraceRow, ...]) -> None:
    """First turns have gaps whose standard deviation equals their mean, within 10 %."""
    gaps_s = [b - a for a, b in pairwise(row.arrival_s for row in rows if row.turn == 0)]
    assert 0.9 <= np.std(gaps_s) / np.mean(gaps_s) <= 1.1


def test_popular_system_prompts_take_most_sessions(rows: tuple[TraceRow, ...]) -> None:
    """Zipf: of 12 system prompts the first takes between a quarter and a half."""
    _, sessions = np.unique([row.block_ids[0] for row in rows if row.turn == 0], return_counts=True)
    assert len(sessions) == 12
    assert 0.25 <= sessions.max() / sessions.sum() <= 0.5


def test_each_turn_extends_the_prompt_and_answer_before_it(rows: tuple[TraceRow, ...]) -> None:
    """A follow-up begins with every block of the earlier prompt and is longer by its answer."""
    last: dict[str | None, TraceRow] = {}
    for row in rows:
        before = last.get(row.session_id)
        if before is not None:
            assert before.block_ids == row.block_ids[: len(before.block_ids)]
            assert row.prompt_tokens > before.prompt_tokens + before.output_tokens
        last[row.session_id] = row


def test_equal_seeds_give_equal_workloads() -> None:
    """The workload is a function of its parameters."""
    small = ChatWorkload(requests_count=50)
    assert generate(small) == generate(small)
    assert generate(small) != generate(ChatWorkload(requests_count=50, seed=1))


def test_prompt_cap_holds_and_rows_rise() -> None:
    """No prompt passes the cap, even where a system prompt alone would; arrivals rise."""
    rows = generate(ChatWorkload(requests_count=300, prompt_tokens_max=1000))
    assert max(row.prompt_tokens for row in rows) <= 1000
    assert len(rows) == 300
    assert list(rows) == sorted(rows, key=lambda row: row.arrival_s)
