"""What is still known of a fleet when Redis shows less."""

import time

import numpy as np
import pytest
from builders import make_fleet_record, make_instance

from indexer.contract.limits import INSTANCE_LEASE_TTL_S
from indexer.contract.records import COUNTERS_RECORD, FleetCounters, SlotFlag
from router.index.known_fleets import RENEWAL_S, SILENCE_S, KnownFleet


def counters(now_s: float, *until_s: float, **columns: int) -> FleetCounters:
    """Used slots with leases until then."""
    slots = np.zeros(len(until_s), COUNTERS_RECORD)
    slots["generation"], slots["flags"], slots["lease_until_s"] = 1, SlotFlag.USED, until_s
    for name, value in columns.items():
        slots[name][0] = value
    return FleetCounters(now_s=now_s, membership=1, epoch=7, slots=slots)


def known() -> KnownFleet:
    """Two instances alive at 100 s, and one whose lease had ended."""
    return KnownFleet(
        record=make_fleet_record(),
        membership=1,
        instances={},
        models={},
        counters=counters(100.0, 104.5, 104.5, 90.0),
        read_s=0.0,
    )


def test_leases_that_ended_in_an_outage_prove_nothing_until_sidecars_could_renew() -> None:
    """Nobody yet: as long as a lease lasts; somebody: a moment; all: at once."""
    fleet = known()
    assert fleet.outlasts(counters(130.0, 104.5, 104.5, 90.0))
    fleet.lapsed_s = time.monotonic() - RENEWAL_S
    assert fleet.outlasts(counters(130.0, 104.5, 104.5, 90.0))
    assert not fleet.outlasts(counters(130.0, 135.0, 104.5, 90.0))  # the other one is dead
    fleet.lapsed_s = time.monotonic() - INSTANCE_LEASE_TTL_S
    assert not fleet.outlasts(counters(130.0, 104.5, 104.5, 90.0))
    fleet.lapsed_s = None
    assert fleet.outlasts(counters(130.0, 135.0, 104.5, 90.0))
    assert not fleet.outlasts(counters(130.0, 135.0, 135.0, 90.0))
    fleet.see(counters(130.0, 135.0, 135.0, 90.0))
    assert fleet.lapsed_s is None


@pytest.mark.parametrize(
    "after",
    [
        counters(100.0 + SILENCE_S - 0.1, 100.0, 104.5, 90.0),  # no outage
        counters(130.0, 135.0, 135.0, 90.0, flags=SlotFlag.USED | SlotFlag.DRAINING),
        counters(130.0, 104.5, 135.0, 90.0, generation=2),  # another instance by now
    ],
    ids=["no outage", "drains", "another"],
)
def test_who_has_left_by_other_ways_is_not_waited_for(after: FleetCounters) -> None:
    """An ended lease without an outage, a drain and a successor are told by the counters."""
    assert not known().outlasts(after)


def test_an_instance_newer_than_the_counters_is_shown_and_not_eligible() -> None:
    """Records and counters are read one after the other; operators see the same fields always."""
    fleet = known()
    fleet.instances = {slot: make_instance(f"i-{slot}") for slot in (0, 3)}
    seen, newer = fleet.view()["instances"]
    assert "eligible" in seen
    assert (newer["eligible"], newer["ineligible_reason"]) == (False, "joining")
