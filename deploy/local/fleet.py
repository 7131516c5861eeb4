"""A fleet of processes on this machine, for `python -m deploy.local` and the demo.

Every part is a process of its own: an embedded Redis, simulated engines with a sidecar each, and
routers that share one port or have one each. When a part ends by itself the whole fleet ends,
naming it; one that was stopped or killed on purpose may be restarted, and more may join.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp

from deploy.local import embedded_redis
from deploy.local.config import FleetConfig
from deploy.local.errors import FleetError, PartCrashError, PartNotReadyError, RunDirError
from deploy.local.layout import (
    NO_DETOURS,
    ROUTER_CACHE_ENVIRONMENT,
    Detours,
    FleetLayout,
    RouterLayout,
    WorkerLayout,
    journal_path,
    lay_out,
)
from deploy.local.part import Part
from deploy.local.ports import PortPicker

POLL_S = 0.1
STOP_GRACE_S = 5.0
PROBE_TIMEOUT_S = 2.0

Report = Callable[[str], None]
"""Takes one line for a person."""


@dataclass(slots=True, kw_only=True)
class LocalFleet:
    """A running fleet; see `running`.

    Attributes:
        config: what was asked for.
        layout: addresses and command lines.
        detours: what lies between the parts.
        moved_ports: (wanted, given) of the ports that were taken.
        redis: the embedded Redis.
        workers: engines, in the order of `layout.workers`.
        sidecars: one per worker, in the same order.
        routers: in the order of `layout.routers`.
    """

    config: FleetConfig
    layout: FleetLayout
    detours: Detours
    moved_ports: tuple[tuple[int, int], ...]
    redis: Part
    workers: tuple[Part, ...]
    sidecars: tuple[Part, ...]
    routers: tuple[Part, ...]
    _report: Report = field(default=print, repr=False)
    _logs: Path = field(repr=False)
    _watchers: asyncio.TaskGroup | None = field(default=None, repr=False)
    _joined: list[Part] = field(default_factory=list, repr=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All processes."""
        return (self.redis, *self.workers, *self.sidecars, *self.routers, *self._joined)

    @classmethod
    @asynccontextmanager
    async def running(cls, config: FleetConfig, report: Report) -> AsyncIterator[Self]:
        """Start a fleet, hand it out when all of it is ready, and stop it at the end.

        Args:
            config: what is wanted.
            report: receives progress, a line at a time.

        Raises:
            PartNotReadyError: a part did not come up in time.
            PartCrashError: a part ended by itself, at any moment; the body is cancelled.
            RunDirError: logs cannot be written.
            NoFreePortError: there is none for a part.
        """
        async with cls.laid_out(config, report, PortPicker(host=config.host)).up() as fleet:
            yield fleet

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Self]:
        """Start what was laid out, and stop it at the end; see `running`."""
        try:
            async with asyncio.TaskGroup() as watchers:
                try:
                    await self.start(watchers)
                    yield self
                finally:
                    await self.stop()
        except BaseExceptionGroup as group:
            raise _first(group) from None

    @classmethod
    def laid_out(
        cls,
        config: FleetConfig,
        report: Report,
        ports: PortPicker,
        detours: Detours = NO_DETOURS,
    ) -> Self:
        """Lay out a fleet of which nothing runs yet.

        Args:
            config: what is wanted.
            report: receives progress, a line at a time.
            ports: gives ports, and has given those of the detours.
            detours: what lies between the parts.

        Raises:
            RunDirError: logs cannot be written.
            NoFreePortError: there is none for a part.
        """
        logs = _empty_run_dir(config)
        layout = lay_out(config, ports.pick, detours)

        def part(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Part:
            return _part(logs, name, command, environment)

        redis_command = embedded_redis.command(
            host=config.host, port=layout.redis_port, directory=config.run_dir
        )
        workers = enumerate(layout.workers, start=1)
        return cls(
            config=config,
            layout=layout,
            detours=detours,
            moved_ports=tuple(ports.moved),
            redis=part("redis", redis_command, detours.redis_environment),
            workers=tuple(part(f"worker-{i}", w.engine_command, {}) for i, w in workers),
            sidecars=tuple(
                part(f"sidecar-{i}", worker.sidecar_command, {})
                for i, worker in enumerate(layout.workers, start=1)
            ),
            routers=tuple(
                part(f"router-{i}", router.command, ROUTER_CACHE_ENVIRONMENT)
                for i, router in enumerate(layout.routers, start=1)
            ),
            _report=report,
            _logs=logs,
        )

    # -- start ------------------------------------------------------------------------------------

    async def start(self, watchers: asyncio.TaskGroup) -> None:
        """Start every part, with a watcher each, and return when all are ready."""
        self._watchers = watchers
        for wanted, given in self.moved_ports:
            self._report(f"port {wanted} is taken, using {given}")

        async def launch(part: Part, ready: Callable[[], Awaitable[None]]) -> None:
            await part.start()
            watchers.create_task(part.watch(), name=part.name)
            try:
                async with asyncio.timeout(self.config.ready_deadline_s):
                    await ready()
            except TimeoutError:
                late = f"{part.name} was not ready after {self.config.ready_deadline_s:g} s"
                raise PartNotReadyError(f"{late}\n{part.tail()}") from None

        await launch(self.redis, lambda: embedded_redis.wait_ready(self.layout.redis_url))
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def launch_worker(number: int) -> None:
                layout = self.layout.workers[number]
                health = f"{layout.engine_url}/health"
                await launch(self.workers[number], lambda: _wait_ok(session, health))
                metrics = f"{layout.sidecar_url}/metrics"
                await launch(self.sidecars[number], lambda: _wait_ok(session, metrics))

            async def launch_router(number: int) -> None:
                url = self.layout.routers[number].admin_url
                await launch(self.routers[number], lambda: self._wait_router(session, url))

            async with asyncio.TaskGroup() as launches:
                for number in range(self.config.workers):
                    launches.create_task(launch_worker(number))
                for number in range(self.config.routers):
                    launches.create_task(launch_router(number))

    async def _wait_router(self, session: aiohttp.ClientSession, url: str) -> None:
        """Return when a router is ready, sees every instance and has loaded their tokenizer."""
        await _wait_ok(session, f"{url}/ready")
        loaded = f'timestable_router_tokenizer_loaded{{model="{self.config.model_name}"}} 1.0'
        while True:
            seen = await instances_seen(session, url)
            async with session.get(f"{url}/metrics") as response:
                metrics = await response.text()
            if seen == self.config.workers and loaded in metrics:
                return
            await asyncio.sleep(POLL_S)

    # -- change -----------------------------------------------------------------------------------

    async def restart(self, part: Part) -> None:
        """Start a part again that was stopped or killed; returns when it runs, not when ready."""
        assert self._watchers is not None
        await part.restart()
        self._watchers.create_task(part.watch(), name=part.name)

    async def join_worker(self, name: str, layout: WorkerLayout) -> tuple[Part, Part]:
        """Start one more engine and its sidecar; returns when they run, not when ready."""
        engine = await self._join(name, layout.engine_command, {})
        return engine, await self._join(f"{name}-sidecar", layout.sidecar_command, {})

    async def join_router(self, name: str, layout: RouterLayout) -> Part:
        """Start one more router; returns when it runs, not when it is ready."""
        return await self._join(name, layout.command, ROUTER_CACHE_ENVIRONMENT)

    async def _join(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Part:
        assert self._watchers is not None
        part = _part(self._logs, name, command, environment)
        self._joined.append(part)
        await part.start()
        self._watchers.create_task(part.watch(), name=name)
        return part

    # -- end --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Routers finish their requests, then sidecars give their slots back, then the rest."""
        try:
            await _stop_all(self._joined, STOP_GRACE_S)
            await _stop_all(self.routers, self.config.drain_s + STOP_GRACE_S)
            await _stop_all(self.sidecars, STOP_GRACE_S)
            await _stop_all(self.workers, STOP_GRACE_S)
            await _stop_all([self.redis], STOP_GRACE_S)
        finally:
            for part in self.parts:
                part.kill()


def _part(logs: Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Part:
    return Part(name=name, command=command, log_path=logs / f"{name}.log", environment=environment)


def _empty_run_dir(config: FleetConfig) -> Path:
    """Remove what an earlier fleet left there, nothing else; return the folder of the logs."""
    logs = config.run_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for left in (*logs.glob("*.log"), *config.run_dir.glob(journal_path(config, "*").name)):
            left.unlink()
    except OSError as error:
        raise RunDirError(f"run_dir: {error}") from error
    return logs


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Pick what to tell: a crash explains the other failures."""
    told: BaseException = group.subgroup(PartCrashError) or group.subgroup(FleetError) or group
    while isinstance(told, BaseExceptionGroup):
        told = told.exceptions[0]
    return told


async def _stop_all(parts: Iterable[Part], grace_s: float) -> None:
    async with asyncio.TaskGroup() as stops:
        for part in parts:
            stops.create_task(part.stop(grace_s))


async def _wait_ok(session: aiohttp.ClientSession, url: str) -> None:
    """Return when a GET answers 200; the caller sets the deadline."""
    while True:
        try:
            async with session.get(url) as response:
                if response.status == 200:  # noqa: PLR2004 - HTTP
                    return
        except (aiohttp.ClientError, TimeoutError):
            pass  # not up yet; what it says when it never comes up is in its log
        await asyncio.sleep(POLL_S)


async def instances_seen(session: aiohttp.ClientSession, admin_url: str) -> int:
    """Instances a router can choose from now."""
    async with session.get(f"{admin_url}/fleet") as response:
        response.raise_for_status()
        body = await response.json()
    return sum(len(fleet["instances"]) for fleet in body["fleets"])
