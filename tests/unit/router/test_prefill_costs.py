"""What a router makes of the first bytes it sees: which count, as what, and for which fleet."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import make_fleet_record, make_request, make_snapshot
from prometheus_client import REGISTRY

from router.decide import decide
from router.policies.least_loaded import LeastLoaded
from router.prefill_costs import FLEETS_MAX, PrefillCosts
from router.prefill_fit import OBSERVATIONS_MIN
from router.snapshot import Decision, FleetSnapshot

LINEAR_S = 1e-4
TOKENS = (100, 1000, 4000)


def decided(prompt_tokens: int, hit_tokens: int = 0, **changes: Any) -> Decision:
    """A request of so many tokens on an idle instance, the only one."""
    snapshot = make_snapshot(prompt_tokens, hit_tokens=[hit_tokens])
    return decide(LeastLoaded(), make_request(prompt_tokens), replace(snapshot, **changes))


def see(costs: PrefillCosts, **changes: Any) -> None:
    """Enough prefills of 100 us for each token that an engine had to compute."""
    for number in range(OBSERVATIONS_MIN):
        tokens = TOKENS[number % len(TOKENS)]
        costs.seen(decided(tokens, **changes), seconds=tokens * LINEAR_S, cached_tokens=None)


def linear_s(costs: PrefillCosts, snapshot: FleetSnapshot | None = None) -> float | None:
    """What a snapshot would say."""
    cost = costs.of((snapshot or make_snapshot(hit_tokens=[0])).fleet.model_scope)
    return None if cost is None else cost.linear_s_per_token


def test_snapshots_say_what_was_seen_and_operators_read_it() -> None:
    """Of the fleet in which it was seen, and of no other."""
    costs, other = PrefillCosts(), make_fleet_record(model_scope="other")
    view: dict[str, Any] = {"fleets": [{"model_scope": "m"}, {"model_scope": "other"}]}
    costs.annotate(view)
    assert [fleet["prefill_cost"] for fleet in view["fleets"]] == [None, None]
    see(costs)
    assert linear_s(costs) == pytest.approx(LINEAR_S, rel=0.01)
    assert linear_s(costs, replace(make_snapshot(hit_tokens=[0]), fleet=other)) is None
    costs.annotate(view)
    known, unknown = view["fleets"]
    assert (known["prefill_cost"]["prefills"], unknown["prefill_cost"]) == (OBSERVATIONS_MIN, None)
    gauge = REGISTRY.get_sample_value("timestable_router_prefill_seconds_per_token", {"fleet": "m"})
    assert gauge == known["prefill_cost"]["linear_s_per_token"] == linear_s(costs)


def test_what_the_engine_says_it_found_is_better_than_the_prediction() -> None:
    """Half of each prompt was predicted and nothing found: all of it was computed."""
    costs = PrefillCosts()
    for number in range(OBSERVATIONS_MIN):
        tokens = TOKENS[number % len(TOKENS)]
        decision = decided(tokens, hit_tokens=tokens // 2)
        costs.seen(decision, seconds=tokens * LINEAR_S, cached_tokens=0)
    assert linear_s(costs) == pytest.approx(LINEAR_S, rel=0.01)


def test_a_slow_device_is_put_on_the_scale_of_the_fastest() -> None:
    """It takes 2.5 times as long, as is known of it."""
    costs = PrefillCosts()
    see(costs, slowness=np.array([2500]))
    assert linear_s(costs) == pytest.approx(LINEAR_S / 2.5, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"degraded": True},
        {"approximate": True},
        {"tier_tokens": np.array([16]), "tier_cost_tokens": np.array([16])},
        {"queued_prefill_tokens": np.array([5000])},
    ],
)
def test_what_is_not_known_well_does_not_count(changes: dict[str, Any]) -> None:
    """Without the index, from text, loaded from a tier, or behind others."""
    costs = PrefillCosts()
    see(costs, **changes)
    assert linear_s(costs) is None


def test_the_number_of_fleets_is_bounded() -> None:
    """The one of which nothing was seen for longest is forgotten, and its series with it."""
    costs, labels = PrefillCosts(), {"fleet": "m"}
    see(costs)
    for number in range(FLEETS_MAX):
        fleet = make_fleet_record(model_scope=f"other-{number}")
        costs.seen(decided(100, fleet=fleet), seconds=0.01, cached_tokens=None)
    assert linear_s(costs) is None
    for name in ("token", "pair"):
        series = f"timestable_router_prefill_seconds_per_{name}"
        assert REGISTRY.get_sample_value(series, labels) is None
