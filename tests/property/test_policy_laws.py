"""Laws every policy, and the product score in particular, must keep."""

from dataclasses import fields, replace

import numpy as np
from builders import make_request, make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from router.decide import rank
from router.eligibility import take
from router.policies import POLICIES
from router.policies.lmetric import LMetric
from router.snapshot import FleetSnapshot

PROMPT_TOKENS = 1000

COLUMNS = [
    one.name
    for one in fields(FleetSnapshot)
    if isinstance(getattr(make_snapshot(hit_tokens=[0]), one.name), np.ndarray)
]

BLIND = {"random", "round_robin", "power_of_two", "least_loaded", "vllm_v1", "session_affinity"}

LOOK_AT_THE_LONGEST_MATCH = {"smg_cache_aware", "preble"}
"""Another one may change what all are scored by."""


@st.composite
def fleets(draw: st.DrawFn) -> FleetSnapshot:
    """Fleets of 1 to 12 instances in any state."""
    count = draw(st.integers(1, 12))

    def column(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    fleet = make_snapshot(
        PROMPT_TOKENS,
        hit_tokens=column(0, PROMPT_TOKENS - 1),
        queued_prefill_tokens=column(0, 400_000),
        batch_size=column(0, 300),
        running_count=column(0, 200),
        waiting_count=column(0, 100),
    )
    instances = tuple(
        replace(one, capacity_blocks=draw(st.sampled_from([None, 0, 10_000])))
        for one in fleet.instances
    )
    usage = np.array(column(0, 1_000_000)) / 1e6
    return replace(fleet, instances=instances, kv_usage_ratio=usage)


@given(fleet=fleets(), sequence=st.integers(0, 1000))
def test_scores_are_finite_one_per_instance(fleet: FleetSnapshot, sequence: int) -> None:
    """A policy scores everyone it is shown, with a number that can be compared, and does it again.

    What it is shown may not be changed: routers decide on it more than once.
    """
    for name in COLUMNS:
        getattr(fleet, name).flags.writeable = False
    request = make_request(PROMPT_TOKENS, sequence=sequence)
    for name, policy in POLICIES.items():
        scores = policy(request, fleet)
        assert scores.shape == (len(fleet.instances),), name
        assert scores.dtype == np.float64, name
        assert np.isfinite(scores).all(), name
        assert policy(request, fleet).tolist() == scores.tolist(), name


@given(fleet=fleets(), data=st.data())
def test_the_order_of_the_fleet_does_not_matter(fleet: FleetSnapshot, data: st.DataObject) -> None:
    """Routers that list the same instances in another order choose the same one."""
    request = make_request(PROMPT_TOKENS)
    shuffled = take(
        fleet, np.array(data.draw(st.permutations(range(len(fleet.instances)))), np.intp)
    )
    for name in set(POLICIES) - {"round_robin"}:
        first = rank(POLICIES[name](request, fleet), request, fleet, 1)[0]
        second = rank(POLICIES[name](request, shuffled), request, shuffled, 1)[0]
        assert fleet.instances[first] == shuffled.instances[second], name


def with_hits(fleet: FleetSnapshot, hit_tokens: np.ndarray) -> FleetSnapshot:
    """The fleet with other hits."""
    return replace(
        fleet,
        depth_tokens=hit_tokens,
        hit_tokens=hit_tokens,
        new_prefill_tokens=PROMPT_TOKENS - hit_tokens,
    )


@given(fleet=fleets(), data=st.data())
def test_more_hits_never_worsen_an_instance(fleet: FleetSnapshot, data: st.DataObject) -> None:
    """Nobody that was behind an instance passes it because it holds more of the prompt."""
    place = data.draw(st.integers(0, len(fleet.instances) - 1))
    more = fleet.hit_tokens.copy()
    more[place] = data.draw(st.integers(int(more[place]), PROMPT_TOKENS - 1))
    request = make_request(PROMPT_TOKENS)
    for name in set(POLICIES) - LOOK_AT_THE_LONGEST_MATCH:
        before, after = (POLICIES[name](request, one) for one in (fleet, with_hits(fleet, more)))
        assert ((before[place] > before) | (after[place] <= after)).all(), name


@given(fleet=fleets(), data=st.data())
def test_a_blind_policy_decides_without_the_cache(
    fleet: FleetSnapshot, data: st.DataObject
) -> None:
    """What instances hold changes no score."""
    count = len(fleet.instances)
    held = data.draw(st.lists(st.integers(0, PROMPT_TOKENS - 1), min_size=count, max_size=count))
    request = make_request(PROMPT_TOKENS, sequence=3)
    other = with_hits(fleet, np.array(held))
    for name in BLIND:
        policy = POLICIES[name]
        assert policy(request, other).tolist() == policy(request, fleet).tolist(), name


@given(fleet=fleets(), data=st.data())
def test_a_slower_device_is_as_one_with_more_to_compute(
    fleet: FleetSnapshot, data: st.DataObject
) -> None:
    """Tokens count by how long they take; where all take as long, nothing is decided otherwise."""
    request = make_request(PROMPT_TOKENS)
    place = data.draw(st.integers(0, len(fleet.instances) - 1))
    factor = data.draw(st.integers(1, 9))
    slowness = np.full(len(fleet.instances), 1000)
    alike = LMetric()(request, replace(fleet, slowness=slowness))
    assert alike.tolist() == LMetric()(request, fleet).tolist()
    slowness[place] *= factor
    slower = LMetric()(request, replace(fleet, slowness=slowness))
    assert slower[place] == alike[place] * factor
    assert np.delete(slower, place).tolist() == np.delete(alike, place).tolist()


@given(fleet=fleets(), factor=st.integers(1, 50))
def test_a_factor_on_either_term_changes_no_choice(fleet: FleetSnapshot, factor: int) -> None:
    """There is nothing to tune: scaling tokens, or scaling batch + 1, keeps the order."""
    request = make_request(PROMPT_TOKENS)
    more_tokens = replace(
        fleet,
        queued_prefill_tokens=fleet.queued_prefill_tokens * factor,
        new_prefill_tokens=fleet.new_prefill_tokens * factor,
    )
    larger_batches = replace(fleet, batch_size=(fleet.batch_size + 1) * factor - 1)
    expected, *scaled = (
        np.argsort(LMetric()(request, one), kind="stable").tolist()
        for one in (fleet, more_tokens, larger_batches)
    )
    assert [expected, expected] == scaled
