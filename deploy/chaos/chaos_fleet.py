"""The local fleet with what can be done to it: proxies in its ways, a clock to move, joins."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from deploy.chaos.clock import MovableClock
from deploy.chaos.config import FIRST_BYTE_TIMEOUT_S, ChaosConfig, fleet_of
from deploy.chaos.delay_proxy import DelayProxy
from deploy.chaos.errors import NotRecoveredError
from deploy.chaos.http_proxy import EngineProxy
from deploy.chaos.records import Excuse
from deploy.local.fleet import LocalFleet
from deploy.local.layout import Detours
from deploy.local.part import Part
from deploy.local.ports import PortPicker

RELAY_PORT = 20_650
ENGINE_PROXY_PORT = 20_660
PROBE_TIMEOUT_S = 2.0
POLL_S = 0.2
HTTP_OK = 200
PROXIED = 0
"""Number of the worker behind the proxy."""
VICTIM = 1
"""Number of the worker that is killed or drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A router, as its clients and operators reach it."""

    name: str
    url: str
    admin_url: str
    part: Part


@dataclass(slots=True, kw_only=True)
class ChaosFleet:
    """What faults are done to.

    Attributes:
        config: what was asked for.
        local: its processes.
        ports: for those that join.
        redis_way: between Redis and everybody else.
        engine_way: between the routers and the first engine.
        clock: of Redis.
        session: for probes.
        doors: routers that are to be up.
        engine_urls: of the instances that are to be eligible, as advertised.
        excuses: of the fault at hand.
        notes: of the fault at hand, for the summary.
    """

    config: ChaosConfig
    local: LocalFleet
    ports: PortPicker
    redis_way: DelayProxy
    engine_way: EngineProxy
    clock: MovableClock
    session: aiohttp.ClientSession
    doors: list[Door]
    engine_urls: set[str]
    excuses: list[Excuse] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    _instance_ids: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def now_s() -> float:
        """The clock of records and excuses."""
        return asyncio.get_running_loop().time()

    @property
    def relay_url(self) -> str:
        """Redis, as routers and sidecars find it."""
        return f"redis://{self.local.config.host}:{self.redis_way.port}"

    def engine_url(self, number: int) -> str:
        """Where routers find the engine of a worker."""
        if number == PROXIED:
            return self.engine_way.url
        return self.local.layout.workers[number].engine_url

    async def instance_id(self, url: str) -> str | None:
        """Instance at an address, as the first router says that sees one there.

        While other faults last no router may see it: then who was there last.
        """
        for door in self.doors:
            await self._instances(door)
        return self._instance_ids.get(url)

    async def _instances(self, door: Door) -> list[dict[str, Any]]:
        try:
            async with self.session.get(f"{door.admin_url}/fleet") as response:
                body = await response.json() if response.status == HTTP_OK else {}
        except (aiohttp.ClientError, TimeoutError, OSError):
            return []
        seen = [one for fleet in body.get("fleets", ()) for one in fleet["instances"]]
        self._instance_ids |= {
            one["url"]: str(one["instance_id"]) for one in seen if one.get("eligible")
        }
        return seen

    async def ready(self, door: Door) -> dict[str, Any] | None:
        """What /ready says when it says yes."""
        try:
            async with self.session.get(f"{door.admin_url}/ready") as response:
                return await response.json() if response.status == HTTP_OK else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def trouble(self) -> str | None:
        """What is not as it is to be; None when the fleet is whole."""
        for door in self.doors:
            said = await self.ready(door)
            if said is None:
                return f"{door.name} is not ready"
            if said.get("degraded"):
                return f"{door.name} is degraded: {said.get('reason')}"
            seen = {one["url"] for one in await self._instances(door) if one.get("eligible")}
            if seen != self.engine_urls:
                missing, odd = sorted(self.engine_urls - seen), sorted(seen - self.engine_urls)
                return f"{door.name} does not see {missing} and should not see {odd}"
            if not await self._probe(door):
                return f"{door.name} did not serve a probe"
        return None

    async def _probe(self, door: Door) -> bool:
        body = {"model": self.local.config.model_name, "prompt": "probe", "max_tokens": 1}
        try:
            async with self.session.post(f"{door.url}/v1/completions", json=body) as response:
                await response.read()
                return response.status == HTTP_OK
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def wait_whole(self, deadline_s: float) -> None:
        """Return when every router is ready, sees exactly the expected instances, and serves.

        Raises:
            NotRecoveredError: not within the deadline; says what is missing.
        """
        await self.wait(self.trouble, deadline_s)

    @staticmethod
    async def wait(trouble: Callable[[], Any], deadline_s: float) -> None:
        """Return when nothing is the matter any more.

        Raises:
            NotRecoveredError: not within the deadline; says what is the matter.
        """
        told: str | None = "nothing was seen"  # no event announces that a fleet is whole
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    told = await trouble()
                    if told is None:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise NotRecoveredError(f"not within {deadline_s:g} s: {told}") from None

    async def excuse_instance(self, cause: str, number: int, **what: Any) -> str | None:
        """Excuse what an instance carries from now on until `end_excuses`."""
        instance_id = await self.instance_id(self.engine_url(number))
        if instance_id is not None:
            now_s, forever = self.now_s(), float("inf")
            one = Excuse(
                cause=cause, since_s=now_s, until_s=forever, instance_id=instance_id, **what
            )
            self.excuses.append(one)
        return instance_id

    def excuse_router(self, cause: str, door: Door) -> None:
        """Excuse what is in flight on a router that has just been killed."""
        now_s = self.now_s()
        self.excuses.append(
            Excuse(cause=cause, since_s=now_s - 0.1, until_s=now_s, router=door.name, broken=True)
        )


@asynccontextmanager
async def running(config: ChaosConfig, report: Callable[[str], None]) -> AsyncIterator[ChaosFleet]:
    """A whole fleet, stopped at the end.

    Raises:
        FleetError: a part did not come up, or ended by itself.
    """
    wanted = fleet_of(config)
    ports = PortPicker(host=wanted.host)
    relay_port, engine_port = ports.pick(RELAY_PORT), ports.pick(ENGINE_PROXY_PORT)
    config.out_dir.mkdir(parents=True, exist_ok=True)
    clock = MovableClock(config.out_dir / "redis-clock")
    detours = Detours(
        redis_url=f"redis://{wanted.host}:{relay_port}",
        advertised_urls={PROXIED: f"http://{wanted.host}:{engine_port}"},
        router_options={
            "first_byte_timeout_s": FIRST_BYTE_TIMEOUT_S,
            "drain_notice_s": 1.0,  # the load's clients look at /ready
        },
        redis_environment=clock.environment,
    )
    local = LocalFleet.laid_out(wanted, report, ports, detours)
    layout = local.layout
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with (
        DelayProxy(wanted.host, layout.redis_port, listen_port=relay_port) as redis_way,
        EngineProxy(
            layout.workers[PROXIED].engine_url, host=wanted.host, port=engine_port
        ) as engine_way,
        local.up(),
        aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
        ) as session,
    ):
        yield ChaosFleet(
            config=config,
            local=local,
            ports=ports,
            redis_way=redis_way,
            engine_way=engine_way,
            clock=clock,
            session=session,
            doors=[
                Door(name=part.name, url=one.url, admin_url=one.admin_url, part=part)
                for one, part in zip(layout.routers, local.routers, strict=True)
            ],
            engine_urls={engine_way.url, *(w.engine_url for w in layout.workers[1:])},
        )
