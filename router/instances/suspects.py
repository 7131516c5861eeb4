"""Instances that have failed lately, for while nobody can say who is alive."""

import time
from collections.abc import Callable
from typing import Final

from indexer.contract.identifiers import InstanceId
from router.eligibility import without
from router.errors import NoEligibleInstance
from router.snapshot import FleetSnapshot

SUSPECT_S: Final = 5.0
"""Then it is tried again; the first failure renews the mark."""

SUSPECTS_MAX: Final = 4096


class Suspects:
    """Marks that expire by themselves; in memory, of this router alone.

    While the index answers, an ended lease tells of a dead instance. Without it every request would
    try the dead one again and wait for a connection that does not come.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[InstanceId, float] = {}

    def note(self, instance_id: InstanceId) -> None:
        """It took no connection, or broke off; one that ran out of time is not noted."""
        now_s = self._clock()
        self._until_s = {one: until for one, until in self._until_s.items() if until > now_s}
        if instance_id in self._until_s or len(self._until_s) < SUSPECTS_MAX:
            self._until_s[instance_id] = now_s + SUSPECT_S

    def spared(self, snapshot: FleetSnapshot) -> FleetSnapshot:
        """A degraded snapshot less its suspects, unless nobody else is left; others as they are."""
        if not snapshot.degraded or not self._until_s:
            return snapshot
        now_s = self._clock()
        suspects = {one for one, until in self._until_s.items() if until > now_s}
        try:
            return without(snapshot, suspects) if suspects else snapshot
        except NoEligibleInstance:
            return snapshot
