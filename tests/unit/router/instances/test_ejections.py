"""Who is left out of decisions, for how long, and how many at most."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from builders import make_instance, make_snapshot
from prometheus_client import REGISTRY
from route_parts import FakeParts, failure

from router.errors import UpstreamCause
from router.instances.ejections import SUSPECT_S, Ejections
from router.instances.standing import EjectionRules
from router.request_record import RequestRecord
from router.snapshot import FleetSnapshot

RULES = EjectionRules(failures_min=3, lease_s=5.0, lease_max_s=20.0, ratio_max=0.5)
ROUTED = 30


@dataclass
class Seen:
    """Ejections under a clock of the test."""

    now_s: float = 100.0
    ejections: Ejections = field(init=False)

    def __post_init__(self) -> None:
        self.ejections = Ejections(RULES, clock=lambda: self.now_s)

    def fail(self, name: str, times: int = 3, cause: UpstreamCause = UpstreamCause.RESET) -> None:
        """As many requests in a row."""
        for _ in range(times):
            self.ejections.failed(make_instance(name), self.now_s, cause)

    def left(self, count: int = 4, *, degraded: bool = False) -> str:
        """Who of a, b, c, ... is left."""
        snapshot = replace(make_snapshot(hit_tokens=[0] * count), degraded=degraded)
        return "".join(ids(self.ejections.spared(snapshot)))


def ids(snapshot: FleetSnapshot) -> list[str]:
    """Instance ids in order."""
    return [record.instance_id for record in snapshot.instances]


def test_as_many_failures_in_a_row_eject() -> None:
    """One served request between them begins the count anew."""
    seen = Seen()
    seen.fail("a", 2)
    seen.ejections.served(make_instance("a"), seen.now_s)
    seen.fail("a", 2)
    assert seen.left() == "abcd"
    seen.fail("a", 1)
    assert seen.left() == "bcd"


@pytest.mark.parametrize("cause", [UpstreamCause.PUSHBACK, UpstreamCause.TOTAL_TIMEOUT])
def test_what_a_healthy_instance_does_is_no_failure(cause: UpstreamCause) -> None:
    """It will not take more, or generates for longer than is allowed here."""
    seen = Seen()
    seen.fail("a", 50, cause)
    assert seen.left() == seen.left(degraded=True) == "abcd"


def test_a_timeout_counts_only_where_nobody_was_answered_meanwhile() -> None:
    """Who hangs is ejected; who is slow under load is not, or the others would follow."""
    seen = Seen()
    sent_s, seen.now_s = seen.now_s, seen.now_s + 60.0
    seen.ejections.answered(make_instance("a"))
    for name in "ab":
        for _ in range(3):
            one = make_instance(name)
            seen.ejections.failed(one, sent_s, UpstreamCause.FIRST_BYTE_TIMEOUT)
    assert seen.left() == "acd"


def test_only_a_share_is_left_out_and_never_the_only_one() -> None:
    """Of more, those whose leases end first stay in."""
    seen = Seen()
    for name in "abc":
        seen.fail(name)
        seen.now_s += 1.0
    assert [seen.left(count) for count in (1, 2, 3, 4, 6)] == ["a", "a", "ab", "ad", "def"]


def test_a_lease_ends_in_a_probe_and_the_next_one_is_longer() -> None:
    """A single failure after a probe ejects again; a request served in trial makes it as good."""
    seen = Seen()
    one = make_instance("a")
    seen.fail("a")
    seen.now_s += 4.9
    assert seen.ejections.due() == []
    seen.now_s += 0.1
    assert seen.ejections.due() == [one]
    seen.ejections.probed(one, healthy=True)
    assert seen.left() == "abcd"
    seen.fail("a", 1)
    assert seen.left() == "bcd"
    seen.now_s += 9.9
    assert seen.ejections.due() == []
    seen.now_s += 0.1
    seen.ejections.probed(one, healthy=False)
    seen.now_s += 20.0  # the bound
    seen.ejections.probed(one, healthy=True)
    seen.ejections.served(one, seen.now_s)
    seen.fail("a", 2)
    assert seen.left() == "abcd"


def test_a_request_served_meanwhile_brings_back_if_it_was_sent_meanwhile() -> None:
    """Where only a share may be left out, users' requests tell sooner than probes."""
    seen = Seen()
    seen.fail("a")
    seen.ejections.served(make_instance("a"), seen.now_s - 1.0)
    assert seen.left() == "bcd"
    seen.now_s += 0.5
    seen.ejections.served(make_instance("a"), seen.now_s)
    assert seen.left() == "abcd"


def test_without_the_index_a_single_failure_is_enough_for_a_while() -> None:
    """Nobody can say who is alive; where everybody has failed, everybody may be tried."""
    seen = Seen()
    seen.fail("a", 1)
    assert (seen.left(2), seen.left(2, degraded=True)) == ("ab", "b")
    seen.fail("b", 1)
    assert seen.left(2, degraded=True) == "ab"
    seen.now_s += SUSPECT_S
    assert seen.left(3, degraded=True) == "abc"


async def test_a_dead_instance_costs_one_request_a_retry_not_each() -> None:
    """Of many degraded requests at most one runs into it."""
    parts = FakeParts(redis_away=True, failures={"a": failure("a")})
    router = parts.router()
    for number in range(ROUTED):
        await router.route(parts, RequestRecord(request_id=str(number), accepted_s=0.0))
    assert parts.asked.count("a") <= 1
    assert len(parts.asked) - parts.asked.count("a") == ROUTED


async def test_with_the_index_it_costs_as_many_as_it_takes_to_eject() -> None:
    """It has the block, so it is the first choice of every request."""
    parts = FakeParts(failures={"a": failure("a", cause=UpstreamCause.CONNECT)})
    before = REGISTRY.get_sample_value("timestable_router_ejections_total", {"cause": "connect"})
    router = parts.router()
    for number in range(ROUTED):
        await router.route(parts, RequestRecord(request_id=str(number), accepted_s=0.0))
    assert (parts.asked.count("a"), len(parts.asked)) == (3, 3 + ROUTED)
    after = REGISTRY.get_sample_value("timestable_router_ejections_total", {"cause": "connect"})
    assert after == (before or 0.0) + 1


def test_who_leaves_the_fleet_is_forgotten() -> None:
    """A restarted engine is another instance."""
    seen = Seen()
    seen.fail("a")
    seen.fail("b")
    seen.ejections.keep({make_instance("b").instance_id})
    assert seen.left() == "acd"
    seen.now_s += 1000.0
    assert ids_due(seen) == ["b"]


def ids_due(seen: Seen) -> list[str]:
    """Who is to be probed."""
    return [record.instance_id for record in seen.ejections.due()]


def test_operators_see_who_is_out_why_and_until_when() -> None:
    """In `/fleet`, beside everything else of an instance."""
    seen = Seen()
    seen.fail("a", cause=UpstreamCause.CONNECT)
    instances: list[dict[str, Any]] = [{"instance_id": "a"}, {"instance_id": "b"}]
    seen.ejections.annotate({"fleets": [{"instances": instances}]})
    ejection = instances[0]["ejection"]
    assert (ejection["cause"], ejection["count"]) == ("connect", 1)
    assert ejection["until_s"] - ejection["since_s"] == pytest.approx(5.0, abs=0.01)
    assert (instances[1]["ejection"], instances[0]["failures_in_a_row"]) == (None, 3)
