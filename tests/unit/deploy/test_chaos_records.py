"""What a fault may cost, and what makes a chaos run fail."""

from dataclasses import replace

import pytest

from deploy.chaos.config import ChaosConfig
from deploy.chaos.faults import CASES, by_name
from deploy.chaos.records import Excuse, Outcome, RequestRecord, tally
from deploy.chaos.summary import FaultResult, as_json, exit_code

BROKEN = RequestRecord(
    request_id="r-1",
    router="router-1",
    instance_id="i-1",
    streamed=True,
    sent_s=10.0,
    first_byte_s=10.5,
    ended_s=12.0,
    outcome=Outcome.BROKEN,
)
REFUSED = replace(BROKEN, outcome=Outcome.ANSWERED_ERROR, status=429)
KILL = Excuse(cause="killed", since_s=11.9, until_s=11.9, router="router-1", broken=True)
GOOD = FaultResult(name="one", requests=10, recovery_s=1.0, counters_zero=True, audit_samples=5)


@pytest.mark.parametrize(
    "other",
    [
        {"router": "router-2"},
        {"ended_s": 11.0},
        {"sent_s": 11.95, "first_byte_s": 11.96},
        {"outcome": Outcome.LATE},
        {"outcome": Outcome.NOWHERE},
        {"outcome": Outcome.ANSWERED_ERROR, "status": 502},
    ],
    ids=["other router", "over before", "sent after", "late", "nowhere", "an answer"],
)
def test_only_what_was_in_flight_on_the_killed_part_is_explained(other: dict[str, object]) -> None:
    """A failure elsewhere, before, after, or of another kind is a loss."""
    assert KILL.covers(BROKEN)
    assert not KILL.covers(replace(BROKEN, **other))  # type: ignore[arg-type]  # varied on purpose


def test_a_killed_engine_explains_only_answers_that_it_had_begun() -> None:
    """Before the first byte a router has to try another instance."""
    kill = Excuse(cause="killed", since_s=11.0, until_s=99.0, instance_id="i-1", broken=True)
    assert kill.covers(BROKEN)
    assert not kill.covers(replace(BROKEN, instance_id=None, first_byte_s=None))


def test_an_engines_own_answer_explains_its_status_for_the_requests_it_hit() -> None:
    """Another status, or a request that was not hit, is a loss."""
    own = Excuse(
        cause="own",
        since_s=0.0,
        until_s=99.0,
        instance_id="i-1",
        statuses=frozenset({429}),
        request_ids=frozenset({"r-1"}),
    )
    assert own.covers(REFUSED)
    assert not own.covers(BROKEN)
    assert not own.covers(replace(REFUSED, status=502))
    assert not own.covers(replace(REFUSED, request_id="r-2"))


def test_a_tally_counts_losses_apart_from_clients_that_left() -> None:
    """Who hangs up has not been failed."""
    left = replace(BROKEN, outcome=Outcome.LEFT)
    fine = replace(BROKEN, outcome=Outcome.OK)
    counted = tally([BROKEN, replace(BROKEN, router="router-2"), left, fine], [KILL])
    assert (counted.requests, counted.failed, counted.failed_explained) == (4, 2, 1)
    assert counted.clients_left == 1
    assert counted.causes == {"killed": 1}
    assert len(counted.unexplained) == 1
    assert "router-2" in counted.unexplained[0]


@pytest.mark.parametrize(
    "bad",
    [
        {"failed": 1},
        {"recovery_s": None},
        {"counters_zero": False},
        {"audit_differences_max": 1},
        {"audit_samples": 0},
        {"trouble": ("left over",)},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_a_run_fails_for_each_thing_a_fault_must_not_cost(bad: dict[str, object]) -> None:
    """One bad fault among good ones is enough."""
    assert exit_code([GOOD, replace(GOOD, failed=2, failed_explained=2)]) == 0
    assert exit_code([GOOD, replace(GOOD, **bad)]) == 1  # type: ignore[arg-type]  # varied
    assert exit_code([GOOD, FaultResult(name="two", skipped="no clock")]) == 0


def test_a_run_that_did_nothing_fails() -> None:
    """An empty list proves nothing, nor does one of which everything was skipped."""
    assert exit_code([]) == 1
    assert exit_code([FaultResult(name="two", skipped="no clock")]) == 1


def test_the_summary_has_what_was_promised_for_each_fault() -> None:
    """Readers rely on these names."""
    (fault,) = as_json([GOOD], seed=1, rate=12.0)["faults"]
    wanted = {"name", "requests", "failed", "failed_explained", "recovery_s", "counters_zero"}
    assert wanted <= set(fault)


def test_faults_are_chosen_by_name_in_the_order_asked_for() -> None:
    """An unknown one is told before a fleet is started, with the known ones."""
    assert [case.name for case in by_name(["router-kill", "baseline"])] == [
        "router-kill",
        "baseline",
    ]
    assert by_name([]) == CASES
    assert len({case.name for case in CASES}) == len(CASES)
    with pytest.raises(ValueError, match=r"no flood; there are baseline"):
        ChaosConfig(faults="flood")
