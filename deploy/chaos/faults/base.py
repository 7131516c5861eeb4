"""What every fault is."""

from enum import StrEnum

from deploy.chaos.chaos_fleet import ChaosFleet


class Target(StrEnum):
    """Whom a fault hits. Faults of different targets may last at the same time."""

    CLIENTS = "clients"
    INSTANCES = "instances"
    ROUTERS = "routers"
    REDIS = "redis"


class FaultCase:
    """Something done to a fleet under load.

    Attributes:
        name: as the summary calls it.
        target: whom it hits.
        hold_s: how long it lasts; None: as long as the run says.
        left_share: share of the clients that leave, before the first byte and mid-stream each;
            None: the load's usual one.
        from_injection: recovery counts from `inject`, not from `end`: what was killed is missing
            from then on.
    """

    name: str
    target: Target
    hold_s: float | None = None
    left_share: tuple[float, float] | None = None
    from_injection: bool = False

    def skip_reason(self) -> str | None:
        """Why it cannot be done here; None when it can."""
        return None

    async def inject(self, fleet: ChaosFleet) -> None:
        """Begin."""

    async def end(self, fleet: ChaosFleet) -> None:
        """Take it back; also called when the run is cut short."""
