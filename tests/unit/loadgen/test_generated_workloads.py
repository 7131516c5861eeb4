"""Generated workloads have the statistics that they claim."""

import functools
from itertools import islice, pairwise

import numpy as np
import pytest
import workload_statistics as statistics

from loadgen.errors import WorkloadError
from loadgen.trace import TraceRow
from loadgen.workloads.agents import AgentSessions, agent_sessions, generate_agents
from loadgen.workloads.cache_mix import API_MIX, CHAT_MIX, CacheMix, generate_mix, mix_sessions
from loadgen.workloads.hot_prefix import QUIET, SUDDEN, TRIGGERING, HotPrefix, generate_hot_prefix

SEED = 5
FLEET = 16


@functools.cache  # a sample takes seconds and is only read
def _mix(mix: CacheMix) -> tuple[TraceRow, ...]:
    return tuple(generate_mix(mix, requests_count=6000, seed=SEED))


@functools.cache
def _hot(spec: HotPrefix) -> tuple[TraceRow, ...]:
    return tuple(generate_hot_prefix(spec, requests_count=4000, seed=SEED))


@pytest.mark.parametrize(
    ("mix", "ideal", "single_turn", "within_s"),
    [(CHAT_MIX, 0.62, 0.50, 600.0), (API_MIX, 0.54, 0.97, 10.0)],
    ids=["chat", "api"],
)
def test_mix_reuses_as_published(
    mix: CacheMix, ideal: float, single_turn: float, within_s: float
) -> None:
    """Ideal hits, single-turn reuse, and 80 % of reuses within 10 minutes or 10 seconds."""
    rows = _mix(mix)
    hits, by_first_turns = statistics.ideal_hits(rows)
    assert hits == pytest.approx(ideal, abs=0.02)
    assert by_first_turns == pytest.approx(single_turn, abs=0.05)
    gaps_s = statistics.reuse_gaps_s(rows)
    assert float((gaps_s <= within_s).mean()) == pytest.approx(0.80, abs=0.04)


def test_hottest_tenth_of_chat_blocks_has_77_percent_of_reuses() -> None:
    """Heavy skew over blocks."""
    share = statistics.reuses_of_hottest_blocks(_mix(CHAT_MIX), 0.1)
    assert share == pytest.approx(0.77, abs=0.04)


def test_api_calls_hardly_ever_have_a_further_turn() -> None:
    """Below 0.1 % of requests."""
    rows = _mix(API_MIX)
    assert sum(bool(row.turn) for row in rows) < 0.001 * len(rows)


def test_gaps_of_chat_are_exponential_with_a_mean_of_their_category() -> None:
    """Of sessions that are not cut by the end of the sample, every category on its own."""
    gaps: dict[str, list[float]] = {}
    for category, gap_s in statistics.turn_gaps_s(_complete_sessions(3000)):
        gaps.setdefault(category, []).append(gap_s)
    for kind in CHAT_MIX.categories:
        of_kind = gaps[kind.name]
        assert np.mean(of_kind) == pytest.approx(kind.gap_mean_s, rel=4 / len(of_kind) ** 0.5)
        assert statistics.distance_to_exponential(of_kind) < 1.6 / len(of_kind) ** 0.5


@functools.cache
def _complete_sessions(count: int) -> tuple[TraceRow, ...]:
    """All turns of the first sessions."""
    return tuple(row for _, rows in islice(mix_sessions(CHAT_MIX, SEED), count) for row in rows)


def test_gaps_of_one_api_client_are_exponential() -> None:
    """The most popular template is reused as a Poisson process."""
    rows = _mix(API_MIX)
    arrivals: dict[int, list[float]] = {}
    for row in rows:
        arrivals.setdefault(row.block_ids[0], []).append(row.arrival_s)
    busiest = max(arrivals.values(), key=len)
    gaps_s = np.diff(busiest)
    assert statistics.distance_to_exponential(gaps_s) < 1.6 / len(gaps_s) ** 0.5


def _product_keeps_winning(spec: HotPrefix, waiting_count: int) -> bool:
    """Whether the only holder, with so many hot requests waiting, beats an idle instance."""
    message = spec.message_tokens_median
    holder = (waiting_count * message + message) * (waiting_count + 1)
    elsewhere = spec.hot_prefix_tokens + message
    return holder < elsewhere


def test_a_sudden_prefix_is_asked_for_once_before_it_is_hot() -> None:
    """By the first request, so that one instance holds it."""
    rows = _hot(SUDDEN)
    hot = [row for row in rows if row.category == "hot"]
    assert rows[0] is hot[0]
    assert hot[1].arrival_s >= SUDDEN.hot_from_s
    assert rows[0].block_ids[:512] == hot[1].block_ids[:512]


@pytest.mark.parametrize(
    ("spec", "triggers"), [(TRIGGERING, True), (QUIET, False)], ids=["triggering", "quiet"]
)
def test_hot_prefix_meets_the_detectors_condition_or_never_does(
    spec: HotPrefix, triggers: bool
) -> None:
    """X / (1 - x) against 1 / (N - 1) over every window of 500 requests, for 16 instances."""
    hot = np.array([row.category == "hot" for row in _hot(spec)])
    assert hot.mean() == pytest.approx(spec.hot_ratio, abs=0.02)
    windows = np.lib.stride_tricks.sliding_window_view(hot, 500).mean(axis=1)
    odds = windows / (1 - windows)
    assert bool((odds > 1 / (FLEET - 1)).all()) is triggers
    assert bool((odds > 1 / (FLEET - 1)).any()) is triggers
    assert (spec.quiet_instances_max < FLEET) is triggers


def test_one_holder_of_the_triggering_prefix_wins_two_requests_in_a_row() -> None:
    """The second phase: 2 M consecutive requests score lower on the holder than anywhere else."""
    assert all(_product_keeps_winning(TRIGGERING, waiting) for waiting in range(5))
    assert not _product_keeps_winning(TRIGGERING, 6)
    short = HotPrefix(hot_prefix_tokens=64)
    assert not _product_keeps_winning(short, 1)


def test_hot_prefix_is_shared_by_hot_requests_only_and_only_while_hot() -> None:
    """From 50 s to 100 s; before and after, none is hot."""
    spec = HotPrefix(hot_from_s=50.0, hot_until_s=100.0)
    rows = list(generate_hot_prefix(spec, requests_count=3000, seed=SEED))
    hot = [row for row in rows if row.category == "hot"]
    blocks = spec.hot_prefix_tokens // spec.block_size_tokens
    prefix = hot[0].block_ids[:blocks]
    assert all(row.block_ids[:blocks] == prefix for row in hot)
    assert not any(prefix[0] in row.block_ids for row in rows if row.category == "cold")
    assert all(50 <= row.arrival_s < 100 for row in hot)
    assert len(hot) == pytest.approx(0.6 * 50 * spec.request_rate, rel=0.15)


def test_agent_sessions_have_the_recorded_medians_and_share_their_tools() -> None:
    """Turns, growth, answers, pauses, restarts; 96 % reuse within a session; one tool part."""
    spec = AgentSessions(length_factor=0.25, prompt_tokens_max=10_000_000)
    sessions = [rows for _, rows in islice(agent_sessions(spec, SEED), 250)]
    rows = [row for session in sessions for row in session]
    turns = [len(session) for session in sessions]
    assert np.median(turns) == pytest.approx(36, rel=0.25)
    assert np.percentile(turns, 90) == pytest.approx(151, rel=0.3)
    growth = [
        after.prompt_tokens - before.prompt_tokens
        for session in sessions
        for before, after in pairwise(session)
    ]
    restarts = sum(tokens < 0 for tokens in growth)
    assert 0.003 < restarts / len(growth) < 0.01
    assert np.median(growth) == pytest.approx(693 / 4, rel=0.05)
    assert np.median([row.output_tokens for row in rows]) == pytest.approx(231 / 4, rel=0.05)
    pauses = [row.think_s for row in rows if row.think_s is not None]
    assert np.percentile(pauses, [50, 90]) == pytest.approx([11, 188], rel=0.15)
    tools = round(11_635 / 4 / 64)
    assert len({row.block_ids[:tools] for row in rows}) == 1
    kept = sum(map(statistics.tokens_of_prompt_before, sessions))
    assert kept / sum(row.prompt_tokens for row in rows) == pytest.approx(0.96, abs=0.02)


@pytest.mark.parametrize("name", ["chat_mix", "hot_prefix", "agents"])
def test_seed_decides_everything(name: str) -> None:
    """Equal seeds give equal rows, others do not; a longer sample begins with the shorter."""

    def make(count: int, seed: int) -> list[TraceRow]:
        if name == "chat_mix":
            return list(generate_mix(CHAT_MIX, requests_count=count, seed=seed))
        if name == "agents":
            return list(generate_agents(AgentSessions(), requests_count=count, seed=seed))
        return list(generate_hot_prefix(TRIGGERING, requests_count=count, seed=seed))

    rows = make(60, 1)
    assert (60, rows, rows[:40]) == (len(rows), make(60, 1), make(40, 1))
    assert rows != make(60, 2)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)


def test_impossible_setting_is_named() -> None:
    """The message has the setting's name as it is given."""
    with pytest.raises(WorkloadError, match=r"hot_prefix\.hot_ratio must be 0 to 1, got 7"):
        HotPrefix(hot_ratio=7)
