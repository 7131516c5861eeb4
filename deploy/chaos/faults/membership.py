"""Instances and routers that join and leave under load."""

from itertools import count

from deploy.chaos.chaos_fleet import ChaosFleet, Door
from deploy.chaos.faults.base import FaultCase, Target
from deploy.local.layout import router_layout, worker_layout
from deploy.local.part import Part

JOIN_DEADLINE_S = 60.0
STOP_GRACE_S = 10.0
_NUMBERS = count(50)


class InstanceJoins(FaultCase):
    """A new instance joins, is used, and leaves: drained first, as its operator would."""

    name = "instance-joins-and-leaves"
    target = Target.INSTANCES
    _parts: tuple[Part, Part] | None = None

    async def inject(self, fleet: ChaosFleet) -> None:
        """Return when every router may choose it."""
        number = next(_NUMBERS)
        layout = worker_layout(fleet.local.config, fleet.relay_url, number, fleet.ports.pick)
        self._layout = layout
        self._parts = await fleet.local.join_worker(f"joined-{number}", layout)
        fleet.engine_urls.add(layout.engine_url)
        await fleet.wait_whole(JOIN_DEADLINE_S)

    async def end(self, fleet: ChaosFleet) -> None:
        """Drain it, wait until it is empty, and stop it."""
        if self._parts is None:
            return
        fleet.engine_urls.discard(self._layout.engine_url)
        async with fleet.session.post(f"{self._layout.sidecar_url}/drain") as response:
            response.raise_for_status()
        await fleet.wait(lambda: self._busy(fleet), JOIN_DEADLINE_S)
        engine, sidecar = self._parts
        await sidecar.stop(STOP_GRACE_S)
        await engine.stop(STOP_GRACE_S)

    async def _busy(self, fleet: ChaosFleet) -> str | None:
        async with fleet.session.get(f"{self._layout.sidecar_url}/state") as response:
            state = await response.json()
        return None if state.get("empty") else f"the drained instance says {state}"


class RouterJoins(FaultCase):
    """A new router joins, is used, and leaves."""

    name = "router-joins-and-leaves"
    target = Target.ROUTERS
    _door: Door | None = None

    async def inject(self, fleet: ChaosFleet) -> None:
        """Return when it serves."""
        number = next(_NUMBERS)
        layout = router_layout(
            fleet.local.config,
            fleet.relay_url,
            number,
            fleet.ports.pick,
            options=fleet.local.detours.router_options,
        )
        part = await fleet.local.join_router(f"joined-router-{number}", layout)
        self._door = Door(name=part.name, url=layout.url, admin_url=layout.admin_url, part=part)
        fleet.doors.append(self._door)
        await fleet.wait_whole(JOIN_DEADLINE_S)

    async def end(self, fleet: ChaosFleet) -> None:
        """Let it finish and leave."""
        if self._door is None:
            return
        await self._door.part.stop(fleet.local.config.drain_s + STOP_GRACE_S)
        fleet.doors.remove(self._door)


CASES = (InstanceJoins, RouterJoins)
