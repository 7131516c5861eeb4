"""What operators may change by HTTP: this router takes no more traffic, an engine gets no more.

An engine's sidecar owns the wish that it be drained. A router tells it by way of Redis, so it needs
no way to the sidecar, and answers once the wish shows in the fleet's counters.
"""

import asyncio
from typing import Any, Final

import structlog
from aiohttp import web

from indexer.contract import fleet_functions, functions
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId, SlotIndex
from indexer.contract.link import Link
from indexer.contract.records import SlotFlag, Wish
from router.door.admission import Admission
from router.errors import IndexUnavailable, InstanceUnknown, NoEligibleInstance
from router.index.index_client import IndexClient
from router.telemetry import instance_label

log = structlog.get_logger()

HEARD_WITHIN_S: Final = 8.0
"""A sidecar takes what it is told with its next heartbeat, every second or, in a fleet of
thousands, every few."""

LOOK_EVERY_S: Final = 0.25
CALL_DEADLINE_S: Final = 2.0
REPEAT_EVERY_S: Final = 2.0
"""The answer to a heartbeat can be lost, and what it told with it."""


class OperatorCalls:
    """Handlers under /admin.

    Args:
        admission: of this router.
        index: knows the instances.
        link: to Redis.
    """

    def __init__(self, admission: Admission, index: IndexClient, link: Link) -> None:
        self._admission = admission
        self._index = index
        self._link = link

    def routes(self) -> list[web.RouteDef]:
        """GET /admin/state, and calls without a body that may be repeated."""
        instance = "/admin/instances/{instance_id:.+}"
        return [
            web.get("/admin/state", self.state),
            web.post("/admin/drain", self.drain),
            web.post("/admin/resume", self.resume),
            web.post(instance + "/drain", self.drain_instance),
            web.post(instance + "/resume", self.resume_instance),
        ]

    async def state(self, _: web.Request) -> web.Response:
        """Whether this router drains, and what it has."""
        return web.json_response(
            {
                "draining": self._admission.draining,
                "in_flight": self._admission.requests,
                "queued": self._admission.queued,
            }
        )

    async def drain(self, request: web.Request) -> web.Response:
        """Not ready from now on.

        Requests that come all the same are served, as the last ones of their connections; SIGTERM
        ends the process as ever.
        """
        self._admission.announce_drain()
        log.info("drain_announced", in_flight=self._admission.requests)
        return await self.state(request)

    async def resume(self, request: web.Request) -> web.Response:
        """Ready again, unless SIGTERM has come."""
        self._admission.resume()
        log.info("drain_taken_back", draining=self._admission.draining)
        return await self.state(request)

    async def drain_instance(self, request: web.Request) -> web.Response:
        """No new request for an engine, all its ranks, until it is resumed or its sidecar ends."""
        return await self._wish(request, Wish(draining=True))

    async def resume_instance(self, request: web.Request) -> web.Response:
        """Requests for it again."""
        return await self._wish(request, Wish(draining=False))

    async def _wish(self, request: web.Request, wish: Wish) -> web.Response:
        """Tell the sidecar until it has heard.

        Raises:
            InstanceUnknown: there is none of this id.
            NoEligibleInstance: its sidecar has not heard in time.
            IndexUnavailable: Redis does not answer.
        """
        asked = request.match_info["instance_id"]
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + HEARD_WITHIN_S
        told_s: float | None = None
        while True:
            fleet, instance = await self._find(asked)
            if (SlotFlag.DRAINING.name in instance["flags"]) is wish.draining:
                log.info("instance_wish_heard", instance=asked, draining=wish.draining)
                return web.json_response(_shown(instance, wish))
            if loop.time() >= ends_s:
                raise NoEligibleInstance(
                    f"The sidecar of {asked} has not heard within {HEARD_WITHIN_S:g} s. Is it "
                    "alive? It may still hear: ask again, or use its own POST /drain."
                )
            if told_s is None or loop.time() - told_s >= REPEAT_EVERY_S:
                await self._tell(fleet, instance, wish)
                told_s = loop.time()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _find(self, asked: str) -> tuple[FleetId, dict[str, Any]]:
        view = await self._index.fleet_view()
        if not view["fresh"]:
            raise IndexUnavailable("The index (Redis) does not answer. Try again.")
        known = []
        for fleet in view["fleets"]:
            for instance in fleet["instances"]:
                names = {instance["instance_id"], instance_label(instance["instance_id"])}
                known.append(instance["instance_id"])
                if asked in names and "flags" in instance:
                    return FleetId(fleet["fleet_id"]), instance
        raise InstanceUnknown(asked, known)

    async def _tell(self, fleet: FleetId, instance: dict[str, Any], wish: Wish) -> None:
        slot, generation = SlotIndex(instance["slot"]), instance["generation"]
        call = fleet_functions.notice(fleet, slot, generation, wish.encode())
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                await functions.run(self._link, call)
        except REDIS_WEATHER as error:
            raise IndexUnavailable("The index (Redis) does not answer. Try again.") from error


def _shown(instance: dict[str, Any], wish: Wish) -> dict[str, Any]:
    counts = ("reserved_requests", "running_count", "waiting_count")
    return {
        "instance_id": instance["instance_id"],
        "draining": wish.draining,
        **{name: instance[name] for name in counts},
    }
