"""Sidecars that die."""

from deploy.chaos.chaos_fleet import VICTIM, ChaosFleet
from deploy.chaos.faults.base import FaultCase, Target


class SidecarKill(FaultCase):
    """A sidecar is killed and started again; its engine goes on."""

    name = "sidecar-kill"
    target = Target.INSTANCES
    from_injection = True

    async def inject(self, fleet: ChaosFleet) -> None:
        """Kill it."""
        await fleet.local.sidecars[VICTIM].killed()

    async def end(self, fleet: ChaosFleet) -> None:
        """Start it."""
        await fleet.local.restart(fleet.local.sidecars[VICTIM])


CASES = (SidecarKill,)
