"""Engines that misbehave, die, or are drained."""

from typing import ClassVar

from deploy.chaos.chaos_fleet import PROXIED, VICTIM, ChaosFleet
from deploy.chaos.config import FIRST_BYTE_TIMEOUT_S
from deploy.chaos.faults.base import FaultCase, Target
from deploy.chaos.http_proxy import Fault

TRIED_ELSEWHERE = {None, 429, 503}


class UpstreamFault(FaultCase):
    """The first engine misbehaves towards routers.

    An answer that it gives itself is passed on by design, except push-back (429, 503), for which
    another engine is tried, and a stream that it breaks off is broken; nothing else may fail.
    """

    target = Target.INSTANCES
    fault: ClassVar[Fault]

    async def inject(self, fleet: ChaosFleet) -> None:
        """Tell the proxy."""
        status = self.fault.status
        passed_on = frozenset({status}) if status not in TRIED_ELSEWHERE else frozenset()
        if self.fault is Fault.HANG:
            passed_on = frozenset({504})  # a timeout is not tried elsewhere, by design
        breaks_off = self.fault in {Fault.RESET_MID_STREAM, Fault.REFUSE}
        if passed_on or breaks_off:
            await fleet.excuse_instance(
                f"the engine's own {self.fault.value}",
                PROXIED,
                statuses=passed_on,
                broken=breaks_off,
                request_ids=fleet.engine_way.hit_ids,
            )
        await fleet.engine_way.set_fault(self.fault)

    async def end(self, fleet: ChaosFleet) -> None:
        """Tell the proxy to pass everything again."""
        await fleet.engine_way.set_fault(None)
        fleet.notes["hits"] = fleet.engine_way.hits[self.fault]


def _upstream(fault: Fault) -> type[UpstreamFault]:
    # A hang has to outlast the routers' deadline, or nobody notices it.
    hold_s = FIRST_BYTE_TIMEOUT_S + 2.0 if fault is Fault.HANG else None
    what = {"name": f"upstream-{fault}", "fault": fault, "hold_s": hold_s}
    return type(f"Upstream{fault.name}", (UpstreamFault,), what)


class EngineKill(FaultCase):
    """An engine is killed and started again."""

    name = "engine-kill"
    target = Target.INSTANCES
    from_injection = True

    async def inject(self, fleet: ChaosFleet) -> None:
        """Kill it; what it was streaming breaks off."""
        cause = "streamed by the killed engine"
        await fleet.excuse_instance(cause, VICTIM, broken=True)
        await fleet.local.workers[VICTIM].killed()

    async def end(self, fleet: ChaosFleet) -> None:
        """Start it."""
        await fleet.local.restart(fleet.local.workers[VICTIM])


class InstanceDrain(FaultCase):
    """An instance is drained, and takes requests again."""

    name = "instance-drain"
    target = Target.INSTANCES

    async def inject(self, fleet: ChaosFleet) -> None:
        """Drain it."""
        await self._post(fleet, "drain")

    async def end(self, fleet: ChaosFleet) -> None:
        """Let it take requests again."""
        await self._post(fleet, "resume")

    async def _post(self, fleet: ChaosFleet, verb: str) -> None:
        url = f"{fleet.local.layout.workers[VICTIM].sidecar_url}/{verb}"
        async with fleet.session.post(url) as response:
            response.raise_for_status()


CASES = (*(_upstream(fault) for fault in Fault), EngineKill, InstanceDrain)
