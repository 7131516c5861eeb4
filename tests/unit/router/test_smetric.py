"""SMetric's rules on a small fleet, computed by hand."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_request, make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from router.decide import rank
from router.policies.lmetric import LMetric
from router.policies.prefill_work import PREFILL_TOKENS_PER_S, expected_ttft_s
from router.policies.smetric import SMetric, history_tokens
from router.snapshot import FleetSnapshot, PrefillCost, RequestView, Scores

# A follow-up of 10,000 tokens of which 8,000 are history; its answer shall begin within
# 1 s + 10 x 62.5 ms = 1.625 s. A token takes 100 us, a pair of tokens 10 ns.
#                a                      b                         c
# hits           8,000                  4,000                     0
# new            2,000                  6,000                     10,000
# own work       0.2 s + 2,000 x 9,000  0.6 s + 6,000 x 7,000     1 s + 10,000 x 5,000
#                x 10 ns = 0.38 s       x 10 ns = 1.02 s          x 10 ns = 1.5 s
# queued         varies                 0                         0
# batch          3                      1                         0
# product, idle  8,000                  12,000                    10,000
PROMPT_TOKENS = 10_000
COST = PrefillCost(linear_s_per_token=1e-4, attention_s_per_pair=1e-8)
FOLLOW_UP = make_request(PROMPT_TOKENS, turn=3, history_tokens=8_000)
STAYS = "tokens not held, ties by expected TTFT"
BEGINS = "product"


def fleet(
    queued: int = 0, context: int = 0, hits: tuple[int, int, int] = (8_000, 4_000, 0)
) -> FleetSnapshot:
    """The fleet above; tokens queued on a, and what each of them attends to."""
    seen = make_snapshot(
        PROMPT_TOKENS,
        hit_tokens=list(hits),
        queued_prefill_tokens=[queued, 0, 0],
        queued_context_tokens=[context, 0, 0],
        batch_size=[3, 1, 0],
    )
    return replace(seen, prefill_cost=COST)


def rule(scores: Scores, request: RequestView, seen: FleetSnapshot) -> str:
    """Which of both rules these scores are by."""
    if scores.tolist() == LMetric()(request, seen).tolist():
        return BEGINS
    assert np.floor(scores).tolist() == (request.prompt_tokens - seen.hit_tokens).tolist()
    return STAYS


@pytest.mark.parametrize(
    ("request_", "seen", "policy", "expected", "chosen"),
    [
        # Most of it is on a, which needs 0.38 s.
        (FOLLOW_UP, fleet(), SMetric(), STAYS, "a"),
        # 10,000 queued tokens are 1 s: 1.38 s in all.
        (FOLLOW_UP, fleet(10_000), SMetric(), STAYS, "a"),
        # They attend to 2,000 each: 0.2 s more, 1.58 s.
        (FOLLOW_UP, fleet(10_000, 2_000), SMetric(), STAYS, "a"),
        # To 3,000 each: 1.68 s > 1.625 s. It moves: 48,000, 12,000 or 10,000.
        (FOLLOW_UP, fleet(10_000, 3_000), SMetric(), BEGINS, "c"),
        # With a quarter of slack more it would not.
        (FOLLOW_UP, fleet(10_000, 3_000), SMetric(slack=1.25), STAYS, "a"),
        (FOLLOW_UP, fleet(), SMetric(slack=0), BEGINS, "a"),
        # A first turn: whatever is held counts by the product. 4 x 3,000, 12,000, 10,000.
        (make_request(PROMPT_TOKENS), fleet(1_000), SMetric(), BEGINS, "c"),
        # 3,984 of 8,000 is less than half: evicted, or compacted. 4 x 6,016, 2 x 6,016, 10,000.
        (FOLLOW_UP, fleet(hits=(3_984, 3_984, 0)), SMetric(), BEGINS, "c"),
        # Half of it is there: it stays.
        (FOLLOW_UP, fleet(hits=(4_000, 0, 0)), SMetric(), STAYS, "a"),
        # By another threshold it would be gone, and by none nothing ever is.
        (FOLLOW_UP, fleet(hits=(4_000, 0, 0)), SMetric(eviction_ratio=0.6), BEGINS, "c"),
        (FOLLOW_UP, fleet(hits=(16, 0, 0)), SMetric(eviction_ratio=0), STAYS, "a"),
        # Nobody says how long the history is: 3 / 4 of the prompt, of which half is 3,750.
        (
            replace(FOLLOW_UP, history_tokens=None),
            fleet(hits=(3_744, 0, 0)),
            SMetric(),
            BEGINS,
            "c",
        ),
        (replace(FOLLOW_UP, history_tokens=None), fleet(hits=(3_760, 0, 0)), SMetric(), STAYS, "a"),
        # Two hold as much; a would be too late, b not.
        (FOLLOW_UP, fleet(90_000, hits=(8_000, 8_000, 0)), SMetric(), STAYS, "b"),
    ],
)
def test_each_rule(
    request_: RequestView, seen: FleetSnapshot, policy: SMetric, expected: str, chosen: str
) -> None:
    """Stay where most of it is, as long as that is in time; otherwise and at first the product."""
    scores = policy(request_, seen)
    assert rule(scores, request_, seen) == expected
    place = rank(scores, request_, seen, 1)[0]
    assert seen.instances[place].instance_id == chosen


def test_expected_ttft_is_the_queues_work_and_its_own() -> None:
    """As in the table above; where devices differ, times how slow each is."""
    seen = fleet(10_000, 2_000)
    assert expected_ttft_s(FOLLOW_UP, seen).tolist() == pytest.approx([1.58, 1.02, 1.5])
    slower = replace(seen, slowness=np.array([1000, 1000, 2500]))
    assert expected_ttft_s(FOLLOW_UP, slower).tolist() == pytest.approx([1.58, 1.02, 3.75])


def test_before_prefills_were_seen_tokens_count_by_a_known_rate() -> None:
    """The instance's own where it is known, else a stated one; attention is left out."""
    seen = replace(fleet(10_000, 3_000), prefill_cost=None)
    instances = (replace(seen.instances[0], prefill_tokens_per_s=4_000.0), *seen.instances[1:])
    expected = [12_000 / 4_000, 6_000 / PREFILL_TOKENS_PER_S, 10_000 / PREFILL_TOKENS_PER_S]
    seen = replace(seen, instances=instances)
    assert expected_ttft_s(FOLLOW_UP, seen).tolist() == pytest.approx(expected)


def test_a_slow_device_counts_in_the_product_too() -> None:
    """Where a session begins or moves, tokens count by how long they take."""
    request, slowness = make_request(PROMPT_TOKENS), np.array([1000, 3000, 2000])
    seen = replace(fleet(), slowness=slowness)
    assert SMetric()(request, seen).tolist() == LMetric()(request, seen).tolist()


@given(
    hits=st.lists(st.integers(0, 9_999), min_size=1, max_size=8),
    queued=st.integers(0, 100_000),
    context=st.integers(0, 100_000),
    turn=st.integers(0, 50),
    history=st.one_of(st.none(), st.integers(0, 10_000)),
)
def test_it_stays_where_most_is_held_or_balances(
    hits: list[int], queued: int, context: int, turn: int, history: int | None
) -> None:
    """Whatever is known: a session is where most of it is, in time, or where LMetric would go."""
    count = len(hits)
    seen = make_snapshot(
        PROMPT_TOKENS,
        hit_tokens=hits,
        queued_prefill_tokens=[queued] * count,
        queued_context_tokens=[context] * count,
        batch_size=list(range(count)),
    )
    seen = replace(seen, prefill_cost=COST)
    request = make_request(PROMPT_TOKENS, turn=turn, history_tokens=history)
    scores = SMetric()(request, seen)
    place = rank(scores, request, seen, 1)[0]
    if rule(scores, request, seen) == STAYS:
        assert turn > 0
        assert hits[place] == max(hits) >= 0.5 * history_tokens(request)
        assert expected_ttft_s(request, seen)[place] <= 1.625
    else:
        assert place == rank(LMetric()(request, seen), request, seen, 1)[0]
