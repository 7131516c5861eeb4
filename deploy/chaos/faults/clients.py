"""Clients that leave, and requests from elsewhere."""

import asyncio

from deploy.chaos.chaos_fleet import HTTP_OK, ChaosFleet
from deploy.chaos.faults.base import FaultCase, Target

FOREIGN_REQUESTS = 10


class Baseline(FaultCase):
    """Nothing happens."""

    name = "baseline"
    target = Target.CLIENTS


class LeaveBeforeFirstByte(FaultCase):
    """Half of the clients hang up at once."""

    name = "clients-leave-before-first-byte"
    target = Target.CLIENTS
    left_share = (0.5, 0.0)


class LeaveMidStream(FaultCase):
    """Half of the clients that stream hang up mid-stream."""

    name = "clients-leave-mid-stream"
    target = Target.CLIENTS
    left_share = (0.0, 0.5)


class ForeignTraffic(FaultCase):
    """Requests reach an engine without any router."""

    name = "traffic-from-elsewhere"
    target = Target.CLIENTS

    async def inject(self, fleet: ChaosFleet) -> None:
        """Send some to the last engine and wait for their answers."""
        url = f"{fleet.local.layout.workers[-1].engine_url}/v1/completions"
        body = {"model": fleet.local.config.model_name, "prompt": "from elsewhere"}

        async def ask() -> bool:
            async with fleet.session.post(url, json={**body, "max_tokens": 60}) as response:
                await response.read()
                return response.status == HTTP_OK

        served = await asyncio.gather(*(ask() for _ in range(FOREIGN_REQUESTS)))
        fleet.notes["foreign_requests_served"] = sum(served)


CASES = (Baseline, LeaveBeforeFirstByte, LeaveMidStream, ForeignTraffic)
