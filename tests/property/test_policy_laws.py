"""Laws every policy, and the product score in particular, must keep."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_request, make_snapshot
from hypothesis import given
from hypothesis import strategies as st

from router.decide import rank
from router.eligibility import take
from router.policies import POLICIES
from router.policies.lmetric import LMetric
from router.snapshot import FleetSnapshot

PROMPT_TOKENS = 1000


@st.composite
def fleets(draw: st.DrawFn) -> FleetSnapshot:
    """Fleets of 1 to 12 instances in any state."""
    count = draw(st.integers(1, 12))

    def column(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    return make_snapshot(
        PROMPT_TOKENS,
        hit_tokens=column(0, PROMPT_TOKENS - 1),
        queued_prefill_tokens=column(0, 100_000),
        batch_size=column(0, 300),
        running_count=column(0, 200),
        waiting_count=column(0, 100),
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(fleet=fleets(), sequence=st.integers(0, 1000))
def test_scores_are_finite_one_per_instance(name: str, fleet: FleetSnapshot, sequence: int) -> None:
    """A policy scores everyone it is shown, with a number that can be compared."""
    scores = POLICIES[name](make_request(PROMPT_TOKENS, sequence=sequence), fleet)
    assert scores.shape == (len(fleet.instances),)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round_robin"}))
@given(fleet=fleets(), data=st.data())
def test_the_order_of_the_fleet_does_not_matter(
    name: str, fleet: FleetSnapshot, data: st.DataObject
) -> None:
    """Routers that list the same instances in another order choose the same one."""
    request = make_request(PROMPT_TOKENS)
    shuffled = take(
        fleet, np.array(data.draw(st.permutations(range(len(fleet.instances)))), np.intp)
    )
    first = rank(POLICIES[name](request, fleet), request, fleet, 1)[0]
    second = rank(POLICIES[name](request, shuffled), request, shuffled, 1)[0]
    assert fleet.instances[first] == shuffled.instances[second]


@given(fleet=fleets(), data=st.data())
def test_more_hits_never_worsen_an_instance(fleet: FleetSnapshot, data: st.DataObject) -> None:
    """The product score falls, or stays, when an instance holds more of the prompt."""
    place = data.draw(st.integers(0, len(fleet.instances) - 1))
    less = fleet.new_prefill_tokens.copy()
    less[place] = data.draw(st.integers(1, int(less[place])))
    better = make_snapshot(
        PROMPT_TOKENS,
        hit_tokens=(PROMPT_TOKENS - less).tolist(),
        queued_prefill_tokens=fleet.queued_prefill_tokens.tolist(),
        batch_size=fleet.batch_size.tolist(),
    )
    request = make_request(PROMPT_TOKENS)
    assert LMetric()(request, better)[place] <= LMetric()(request, fleet)[place]


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
