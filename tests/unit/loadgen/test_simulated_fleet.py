"""The fleet in virtual time: deterministic, leaves nothing behind, herds only when it may."""

from dataclasses import replace

import numpy as np
import pytest

from loadgen.simulation.fleet import FleetSpec, VirtualFleet
from loadgen.simulation.workload import Session, Turn, WorkloadSpec, draw_sessions
from router.policies import POLICIES

END_S = 6.0
SESSIONS = draw_sessions(WorkloadSpec(session_rate=12, duration_s=END_S), 1)


def played(*, routers: int, shares: bool, sessions: list[Session] = SESSIONS) -> VirtualFleet:
    """A fleet after a run."""
    spec = FleetSpec(routers_count=routers, end_s=END_S, shares_reservations=shares)
    fleet = VirtualFleet(spec, POLICIES["lmetric"], 1)
    fleet.play(sessions)
    return fleet


def herd() -> list[Session]:
    """200 equal requests within 20 ms."""
    prompt = np.arange(2000, dtype=np.uint32).tobytes()
    turn = Turn(message=b"\1\0\0\0" * 16, output_tokens=20, think_s=0, seed=1)
    return [
        Session(session_id=f"s{i}", start_s=0.5 + i * 1e-4, shared=prompt, turns=(turn,))
        for i in range(200)
    ]


def per_instance(fleet: VirtualFleet) -> list[int]:
    """Requests of each instance, ascending: which instance is first is the lottery's."""
    return sorted(np.bincount([r.slot for r in fleet.records], minlength=16).tolist())


def test_equal_arguments_give_equal_runs() -> None:
    """Every record of two runs is equal, and another seed's workload is not."""
    first, second = (played(routers=4, shares=True) for _ in range(2))
    assert first.records == second.records
    assert draw_sessions(WorkloadSpec(session_rate=12, duration_s=END_S), 2) != SESSIONS


@pytest.mark.parametrize("shares", [True, False])
def test_every_request_ends_and_every_counter_is_zero(shares: bool) -> None:
    """Conservation."""
    fleet = played(routers=4, shares=shares)
    assert len(fleet.records) > 60
    assert not any(np.isnan(r.ended_s) or r.ttft_s <= 0 for r in fleet.records)
    assert not fleet.books.entries
    assert not fleet.books.slots["reserved_requests"].any()
    assert not fleet.books.slots["reserved_prefill_tokens"].any()
    assert fleet.own.is_empty
    assert not any(e.running_count + e.waiting_count for e in fleet.engines)


def test_every_policy_plays_and_leaves_nothing() -> None:
    """The router's own policies, each with a memory per virtual router; twice the same run."""
    sessions = draw_sessions(WorkloadSpec(session_rate=8, duration_s=1.0), 1)
    spec = FleetSpec(routers_count=2, end_s=1.0, instances_count=4)
    for name, policy in POLICIES.items():
        fleet, again = (VirtualFleet(spec, policy, 1) for _ in range(2))
        records = fleet.play(sessions).records
        assert records, name
        assert records == again.play(sessions).records, name
        assert not fleet.books.entries, name
        assert not fleet.books.slots["reserved_requests"].any(), name
        assert not fleet.books.slots["reserved_prefill_tokens"].any(), name


def test_a_workload_does_not_depend_on_the_number_of_routers() -> None:
    """First turns are the same requests at the same time."""
    first, second = (played(routers=n, shares=True) for n in (1, 8))
    arrivals = [
        {r.request_id: r.arrived_s for r in f.records if r.request_id.endswith("-0")}
        for f in (first, second)
    ]
    assert arrivals[0] == arrivals[1]


def test_a_herd_through_eight_routers_lands_as_through_one() -> None:
    """Within one request per instance; without reservations it does not."""
    alone = per_instance(played(routers=1, shares=True, sessions=herd()))
    shared = per_instance(played(routers=8, shares=True, sessions=herd()))
    assert max(abs(a - b) for a, b in zip(alone, shared, strict=True)) <= 1
    unshared = per_instance(played(routers=8, shares=False, sessions=herd()))
    assert max(unshared) > max(shared) + 1


def test_unshared_routers_are_slower() -> None:
    """What routers do not know of each other costs time to first token, at a third of capacity."""
    sessions = draw_sessions(WorkloadSpec(session_rate=80, duration_s=3.0), 1)
    shared_s, unshared_s = (
        np.mean([r.ttft_s for r in played(routers=8, shares=s, sessions=sessions).records])
        for s in (True, False)
    )
    assert unshared_s > 1.1 * shared_s, (unshared_s, shared_s)


def test_a_joining_instance_gets_nothing_before() -> None:
    """The last slot is empty until it joins, and is used after."""
    spec = replace(FleetSpec(routers_count=1, end_s=END_S), join_s=3.0)
    fleet = VirtualFleet(spec, POLICIES["lmetric"], 1)
    fleet.play(SESSIONS)
    arrived = [r.arrived_s for r in fleet.records if r.slot == 15]
    assert arrived
    assert min(arrived) >= 2.99
