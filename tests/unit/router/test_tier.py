"""What a tier of KV$ changes in what a policy sees, on small hand-computed cases."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_instance, make_request, make_snapshot

from indexer.contract.limits import PROMPT_TOKENS_MAX
from router.decide import decide
from router.eligibility import take
from router.policies.lmetric import LMetric
from router.snapshot import FleetSnapshot, PrefillCost
from router.tier import TierLoad, TierRoster, with_tier

PROMPT_TOKENS = 1600
LOAD = TierLoad(tokens_per_s=10_000.0, latency_s=0.01)
COST = PrefillCost(linear_s_per_token=1e-3, attention_s_per_pair=0.0)
"""Loading is ten times as fast as computing."""


def seen(*, hits: list[int], depth: int, load: TierLoad = LOAD) -> FleetSnapshot:
    """Instances with these local hits and a tier that holds so much of the prompt."""
    snapshot = replace(make_snapshot(PROMPT_TOKENS, hit_tokens=hits), prefill_cost=COST)
    return with_tier(snapshot, PROMPT_TOKENS, depth, load)


def test_loaded_tokens_count_by_the_time_their_load_takes() -> None:
    """800 loaded tokens take 10 ms + 80 ms, as long as computing 90; 800 more are computed."""
    fleet = seen(hits=[0], depth=800)
    assert fleet.tier_tokens is not None
    assert (fleet.tier_tokens.tolist(), fleet.new_prefill_tokens.tolist()) == ([800], [890])


def test_each_instance_loads_what_it_lacks_itself() -> None:
    """Of the 800 tokens in the tier: 400 behind a local hit of 400, none where 1200 are held."""
    fleet = seen(hits=[400, 1200], depth=800)
    assert fleet.tier_tokens is not None
    assert fleet.tier_tokens.tolist() == [400, 0]
    assert fleet.new_prefill_tokens.tolist() == [800 + 50, 400]
    assert fleet.hit_tokens.tolist() == [400, 1200]


def test_the_last_token_is_computed_and_whole_blocks_are_loaded() -> None:
    """Of 1600 tokens in the tier, in blocks of 16, 1584 are loaded."""
    fleet = seen(hits=[0], depth=PROMPT_TOKENS)
    assert fleet.tier_tokens is not None
    assert fleet.tier_tokens.tolist() == [1584]


def test_a_tier_that_holds_nothing_more_changes_nothing() -> None:
    """No column appears, so every score is the very one without a tier."""
    without = make_snapshot(PROMPT_TOKENS, hit_tokens=[800, 960])
    assert with_tier(without, PROMPT_TOKENS, 800, LOAD) is without


def test_the_product_prefers_an_idle_instance_that_loads() -> None:
    """Without the tier the holder wins, 200 x 2 < 1600 x 1; with it 168 < 200 x 2."""
    hits, busy = [1400 // 16 * 16, 0], np.array([1, 0])
    alone = replace(
        make_snapshot(PROMPT_TOKENS, hit_tokens=hits), batch_size=busy, prefill_cost=COST
    )
    fast = TierLoad(tokens_per_s=1e5, latency_s=0.0)
    tiered = with_tier(alone, PROMPT_TOKENS, PROMPT_TOKENS, fast)
    request = make_request(PROMPT_TOKENS)
    assert LMetric()(request, alone).argmin() == 0
    assert LMetric()(request, tiered).argmin() == 1
    decision = decide(LMetric(), request, tiered)
    assert (decision.tier_tokens, decision.prompt_tokens) == (1584, PROMPT_TOKENS)


def test_a_slow_tier_counts_as_more_than_computing() -> None:
    """An engine loads what it finds; a hundred tokens a second make that the worst choice."""
    fleet = seen(hits=[0], depth=1600, load=TierLoad(tokens_per_s=100.0, latency_s=0.0))
    assert fleet.new_prefill_tokens.tolist() == [16 + 15_840]


def test_a_load_is_weighed_against_computing_in_the_same_context() -> None:
    """1,584 tokens that attend to 792 each take 1.25 s, their load 168.4 ms: as long as 213.

    A fit in which attention explains everything must not make tokens free to compute.
    """
    fleet = make_snapshot(PROMPT_TOKENS, hit_tokens=[0])
    cost = PrefillCost(linear_s_per_token=1e-8, attention_s_per_pair=1e-6)
    fleet = with_tier(replace(fleet, prefill_cost=cost), PROMPT_TOKENS, PROMPT_TOKENS, LOAD)
    assert fleet.tier_cost_tokens is not None
    assert fleet.tier_cost_tokens.tolist() == [213]


@pytest.mark.parametrize("tokens_per_s", [1e-3, 1e-300])
def test_no_load_counts_as_more_than_the_longest_prompt(tokens_per_s: float) -> None:
    """Routers book it in counters of 32 bits, which all of them share."""
    fleet = seen(hits=[0], depth=1600, load=TierLoad(tokens_per_s=tokens_per_s, latency_s=0.0))
    assert fleet.new_prefill_tokens.tolist() == [16 + PROMPT_TOKENS_MAX]


def test_what_a_request_in_flight_will_compute_is_loaded_where_the_tier_holds_as_much() -> None:
    """Else it is waited for; the resident part is hit either way."""
    snapshot = replace(
        make_snapshot(PROMPT_TOKENS, hit_tokens=[480, 960]),
        in_flight_tokens=np.array([320, 320]),
        prefill_cost=COST,
    )
    fleet = with_tier(snapshot, PROMPT_TOKENS, 640, LOAD)
    assert fleet.tier_tokens is not None
    assert fleet.hit_tokens.tolist() == [160, 960]
    assert fleet.in_flight_tokens.tolist() == [0, 320]
    assert fleet.tier_tokens.tolist() == [480, 0]


@pytest.mark.parametrize(
    ("cost", "slowness", "expected"),
    [
        (None, None, [8, 16]),  # by each instance's own rate, else by the assumed one
        (PrefillCost(linear_s_per_token=0.005, attention_s_per_pair=0.0), None, [2, 2]),
        (PrefillCost(linear_s_per_token=0.005, attention_s_per_pair=0.0), [1000, 2000], [2, 1]),
    ],
)
def test_a_tokens_time_is_the_fleets_fitted_one_or_the_instances_own_rate(
    cost: PrefillCost | None, slowness: list[int] | None, expected: list[int]
) -> None:
    """10 ms of loading are so many tokens of prefill."""
    fleet = make_snapshot(PROMPT_TOKENS, hit_tokens=[0, 0])
    rates = (800.0, 1600.0)
    fleet = replace(
        fleet,
        instances=tuple(
            replace(one, prefill_tokens_per_s=rate)
            for one, rate in zip(fleet.instances, rates, strict=True)
        ),
        prefill_cost=cost,
        slowness=None if slowness is None else np.array(slowness),
    )
    tiered = with_tier(fleet, PROMPT_TOKENS, 16, TierLoad(tokens_per_s=1e9, latency_s=0.00999))
    assert tiered.tier_cost_tokens is not None
    assert tiered.tier_cost_tokens.tolist() == expected


def test_the_columns_follow_a_choice_of_places() -> None:
    """Who is tried again is seen as before."""
    fleet = take(seen(hits=[0, 400], depth=800), np.array([1]))
    assert fleet.tier_tokens is not None
    assert fleet.tier_cost_tokens is not None
    assert (fleet.tier_tokens.tolist(), fleet.tier_cost_tokens.tolist()) == ([400], [50])


def test_who_shares_can_load_what_the_deepest_sharer_has_written() -> None:
    """Others can load what they wrote themselves, and who has no tier nothing."""
    records = [
        make_instance("a", tier_tokens_per_s=100.0, tier_shared=True),
        make_instance("b", tier_tokens_per_s=200.0, tier_latency_s=0.5, tier_shared=True),
        make_instance("c", tier_tokens_per_s=100.0),
        make_instance("d"),
    ]
    tiers = TierRoster.of(records)
    assert tiers is not None
    assert tiers.depths(np.array([0, 64, 32, 99])).tolist() == [64, 64, 32, 0]
    assert tiers.take(np.array([1, 2])).depths(np.array([0, 32])).tolist() == [0, 32]
    assert TierRoster.of(records[3:]) is None
