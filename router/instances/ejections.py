"""Instances that have failed lately, as this router alone has seen them; nothing is for ever."""

import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import structlog

from indexer.contract.identifiers import InstanceId
from indexer.contract.records import InstanceRecord
from router import telemetry
from router.eligibility import without
from router.errors import UpstreamCause
from router.instances.standing import EjectionRules, Standing, left_out_max
from router.snapshot import FleetSnapshot

log = structlog.get_logger()

SUSPECT_S: Final = 5.0
"""So long after a failure an instance is left out of decisions made without the index."""

INSTANCES_MAX: Final = 8192
"""Of whom anything is remembered; beyond, further ones are not ejected."""

_HARMLESS: Final = frozenset(
    {UpstreamCause.PUSHBACK, UpstreamCause.TRANSFER, UpstreamCause.TOTAL_TIMEOUT}
)
"""A healthy instance that takes no more, and a limit that the operator set for answers."""


@dataclass(slots=True, kw_only=True)
class _Known:
    instance: InstanceRecord
    standing: Standing


class Ejections:
    """Who is left out of decisions because requests to it failed.

    Ended leases in the index tell of dead engines within seconds; this tells of those that only
    this router cannot reach, that answer health checks and no requests, and, while the index is
    away, of everyone.

    Args:
        rules: how much an instance may fail.
        clock: monotonic seconds.
    """

    def __init__(
        self, rules: EjectionRules, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._troubled: dict[InstanceId, _Known] = {}
        self._alive_s: dict[InstanceId, float] = {}

    # -- what requests tell -----------------------------------------------------------------------

    def answered(self, instance: InstanceRecord) -> None:
        """It has begun an answer below 500."""
        instance_id = instance.instance_id
        if instance_id in self._alive_s or len(self._alive_s) < INSTANCES_MAX:
            self._alive_s[instance_id] = self._clock()

    def served(self, instance: InstanceRecord, sent_s: float) -> None:
        """An answer has come to its end.

        Args:
            instance: whose.
            sent_s: when the request was sent.
        """
        known = self._troubled.get(instance.instance_id)
        if known is not None:
            self._settle(known, known.standing.served(sent_s), by="served")

    def failed(self, instance: InstanceRecord, sent_s: float, cause: UpstreamCause) -> None:
        """A request failed; push-back, a lost transfer, a total timeout are not the instance's."""
        if cause in _HARMLESS:
            return
        known = self._troubled.get(instance.instance_id)
        if known is None:
            if len(self._troubled) >= INSTANCES_MAX:
                return
            known = _Known(instance=instance, standing=Standing())
            self._troubled[instance.instance_id] = known
        standing = known.standing.failed(
            self._clock(),
            cause,
            self._rules,
            sent_s=sent_s,
            alive_s=self._alive_s.get(instance.instance_id, 0.0),
        )
        self._settle(known, standing, by="failures")

    # -- what decisions ask -----------------------------------------------------------------------

    def spared(self, snapshot: FleetSnapshot) -> FleetSnapshot:
        """The snapshot less those who are ejected, as far as enough others are left.

        Of more ejected ones than may be left out those stay in whose leases end first. A snapshot
        without the index is less by whoever has failed a moment ago, too, unless nobody is left.
        """
        if not self._troubled:
            return snapshot
        present = [one.instance_id for one in snapshot.instances]
        ejected = [
            (known.standing.until_s or 0.0, one)
            for one in present
            if (known := self._troubled.get(one)) is not None and known.standing.ejected
        ]
        ejected.sort(reverse=True)
        left_out = {one for _, one in ejected[: left_out_max(len(present), self._rules)]}
        if snapshot.degraded:
            suspects = left_out | self._suspects(present)
            left_out = suspects if len(suspects) < len(present) else left_out
        return without(snapshot, left_out) if left_out else snapshot

    def _suspects(self, present: list[InstanceId]) -> set[InstanceId]:
        since_s = self._clock() - SUSPECT_S
        return {
            one
            for one in present
            if (known := self._troubled.get(one)) is not None and known.standing.failed_s > since_s
        }

    # -- what the prober does ---------------------------------------------------------------------

    def due(self) -> list[InstanceRecord]:
        """Whom to probe now: whose lease is over."""
        now_s = self._clock()
        return [
            known.instance for known in self._troubled.values() if known.standing.probe_due(now_s)
        ]

    def probed(self, instance: InstanceRecord, *, healthy: bool) -> None:
        """A probe was answered, or was not."""
        telemetry.PROBES.labels(result="healthy" if healthy else "failed").inc()
        known = self._troubled.get(instance.instance_id)
        if known is not None:
            standing = known.standing.probed(self._clock(), self._rules, healthy=healthy)
            self._settle(known, standing, by="probe")

    def keep(self, present: AbstractSet[InstanceId]) -> None:
        """Forget all others, because a restarted engine is another instance; and old troubles."""
        now_s = self._clock()
        for one, known in list(self._troubled.items()):
            if one not in present or known.standing.forgiven(now_s, self._rules):
                del self._troubled[one]
        for gone in self._alive_s.keys() - present:
            del self._alive_s[gone]
        self._count()

    # -- what operators see -----------------------------------------------------------------------

    def annotate(self, fleet_view: dict[str, Any]) -> None:
        """Add `ejection` to every instance of `IndexClient.fleet_view`: None, or why and how long.

        `until_s` is wall clock, like every time there; then a probe decides.
        """
        now_s = self._clock()
        wall_s = time.time() - now_s
        for fleet in fleet_view["fleets"]:
            for instance in fleet["instances"]:
                known = self._troubled.get(instance["instance_id"])
                standing = known.standing if known is not None else Standing()
                instance["failures_in_a_row"] = standing.failures_count
                instance["ejection"] = (
                    None
                    if standing.until_s is None
                    else {
                        "cause": standing.cause,
                        "since_s": round(wall_s + standing.ejected_s, 3),
                        "until_s": round(wall_s + standing.until_s, 3),
                        "count": standing.ejections_count,
                    }
                )

    def _settle(self, known: _Known, standing: Standing, *, by: str) -> None:
        before, known.standing = known.standing, standing
        instance_id = known.instance.instance_id
        if standing.ejected and standing is not before:
            assert standing.until_s is not None
            fresh = not before.ejected
            if fresh:
                telemetry.EJECTIONS.labels(cause=standing.cause).inc()
            if fresh or standing.until_s != before.until_s:
                log.warning(
                    "instance_ejected" if fresh else "instance_still_ejected",
                    instance_id=instance_id,
                    cause=standing.cause,
                    by=by,
                    lease_s=round(standing.until_s - standing.ejected_s, 3),
                    count=standing.ejections_count,
                )
        elif before.ejected:
            log.info("instance_returned", instance_id=instance_id, by=by)
        if standing.ejected != before.ejected:
            self._count()

    def _count(self) -> None:
        ejected = sum(known.standing.ejected for known in self._troubled.values())
        telemetry.EJECTED_INSTANCES.set(ejected)
