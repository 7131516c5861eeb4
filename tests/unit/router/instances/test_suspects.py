"""Instances that failed are not tried first again, while nobody can say who is alive."""

from dataclasses import replace

from builders import make_instance, make_snapshot
from route_parts import FakeParts, failure

from router.instances.suspects import SUSPECT_S, Suspects
from router.snapshot import FleetSnapshot
from router.telemetry import RequestRecord


def ids(snapshot: FleetSnapshot) -> list[str]:
    """Instance ids in order."""
    return [record.instance_id for record in snapshot.instances]


def test_marks_end_by_themselves_and_count_without_the_index_only() -> None:
    """With it, leases tell; and where everybody is suspect, everybody may be tried."""
    now_s = [0.0]
    suspects = Suspects(lambda: now_s[0])
    fresh = make_snapshot(hit_tokens=[0, 0])
    degraded = replace(fresh, degraded=True)
    suspects.note(make_instance("a").instance_id)
    assert ids(suspects.spared(fresh)) == ["a", "b"]
    assert ids(suspects.spared(degraded)) == ["b"]
    suspects.note(make_instance("b").instance_id)
    assert ids(suspects.spared(degraded)) == ["a", "b"]
    now_s[0] = SUSPECT_S
    assert ids(suspects.spared(degraded)) == ["a", "b"]
    assert suspects._until_s
    suspects.note(make_instance("c").instance_id)
    assert list(suspects._until_s) == ["c"]


async def test_a_dead_instance_costs_one_request_a_retry_not_each() -> None:
    """Of ten degraded requests at most one runs into it."""
    parts = FakeParts(redis_away=True, failures={"a": failure("a")})
    router = parts.router()
    for number in range(10):
        await router.route(parts, RequestRecord(request_id=str(number), accepted_s=0.0))
    assert parts.asked.count("a") <= 1
    assert len(parts.asked) - parts.asked.count("a") == 10
