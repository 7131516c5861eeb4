"""The clock of Redis jumps: the one that leases are measured by."""

from typing import ClassVar

from deploy.chaos import clock
from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.faults.base import FaultCase, Target

HOUR_S = 3600


class _ClockJump(FaultCase):
    target = Target.REDIS
    offset_s: ClassVar[int]

    def skip_reason(self) -> str | None:
        """Where there is no libfaketime."""
        return clock.unavailable_reason()

    async def inject(self, fleet: ChaosFleet) -> None:
        """Jump."""
        fleet.clock.set_offset_s(self.offset_s)


class ClockForward(_ClockJump):
    """An hour ahead, and it stays there."""

    name = "redis-clock-forward"
    offset_s = HOUR_S


class ClockBack(_ClockJump):
    """Back to the right time, which is an hour back."""

    name = "redis-clock-back"
    offset_s = 0


CASES = (ClockForward, ClockBack)
