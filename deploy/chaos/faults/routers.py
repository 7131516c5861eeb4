"""Routers that die, drain, or stand still."""

from deploy.chaos.chaos_fleet import ChaosFleet
from deploy.chaos.faults.base import FaultCase, Target
from deploy.chaos.records import Excuse

LAST = -1
PAUSE_S = 12.0
"""Longer than a router's lease."""


class RouterKill(FaultCase):
    """A router is killed and started again."""

    name = "router-kill"
    target = Target.ROUTERS
    from_injection = True

    async def inject(self, fleet: ChaosFleet) -> None:
        """Kill it; what is in flight on it is lost."""
        door = fleet.doors[LAST]
        await door.part.killed()
        fleet.excuse_router("in flight on the killed router", door)

    async def end(self, fleet: ChaosFleet) -> None:
        """Start it."""
        await fleet.local.restart(fleet.doors[LAST].part)


class RouterDrain(FaultCase):
    """A router is asked to end, and started again; nothing may fail."""

    name = "router-drain"
    target = Target.ROUTERS
    from_injection = True
    hold_s = 1.0

    async def inject(self, fleet: ChaosFleet) -> None:
        """Return when it has ended."""
        part = fleet.doors[LAST].part
        await part.stop(fleet.local.config.drain_s + 10.0)
        fleet.notes["exit_code"] = part.exit_code

    async def end(self, fleet: ChaosFleet) -> None:
        """Start it."""
        await fleet.local.restart(fleet.doors[LAST].part)


class RouterPause(FaultCase):
    """A router stands still beyond its lease, so the others reap it; then it goes on."""

    name = "router-pause"
    target = Target.ROUTERS
    hold_s = PAUSE_S

    async def inject(self, fleet: ChaosFleet) -> None:
        """Let it stand still; its own deadlines pass meanwhile for what is in flight on it."""
        door = fleet.doors[LAST]
        door.part.pause()
        now_s = fleet.now_s()
        fleet.excuses.append(
            Excuse(
                cause="in flight on the paused router",
                since_s=now_s,
                until_s=now_s + PAUSE_S,
                router=door.name,
                broken=True,
                statuses=frozenset({504}),
            )
        )

    async def end(self, fleet: ChaosFleet) -> None:
        """Let it go on; what it held all the time may have been too late for either side."""
        fleet.doors[LAST].part.resume()


CASES = (RouterKill, RouterDrain, RouterPause)
