"""Sidecars that die."""

from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.faults.base import FaultCase

KILLED = 1


class SidecarKill(FaultCase):
    """A sidecar is killed and started again; its engine goes on."""

    name = "sidecar-kill"
    from_injection = True

    async def inject(self, fleet: ChaosFleet) -> None:
        """Kill it."""
        await fleet.local.sidecars[KILLED].killed()

    async def end(self, fleet: ChaosFleet) -> None:
        """Start it."""
        await fleet.local.restart(fleet.local.sidecars[KILLED])


CASES = (SidecarKill,)
