"""The local fleet: `python -m deploy.local`, and `LocalFleet` for the demo and the tests.

Every part is a process of its own: an embedded Redis, simulated engines with a sidecar each, and
routers that share one port. When a part ends by itself the whole fleet ends, naming it.
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from signal import Signals
from typing import Self

import aiohttp
from jsonargparse import auto_cli

from deploy import embedded_redis, signals
from deploy.config import FleetConfig
from deploy.errors import FleetError, PartCrashError, PartNotReadyError
from deploy.part import Part
from deploy.plan import ROUTER_CACHE_ENVIRONMENT, FleetPlan, make_plan
from deploy.ports import PortPicker

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
        plan: addresses and command lines.
        moved_ports: (wanted, given) of the ports that were taken.
        redis: the embedded Redis.
        workers: engines, in the order of `plan.workers`.
        sidecars: one per worker, in the same order.
        routers: in the order of `plan.routers`.
    """

    config: FleetConfig
    plan: FleetPlan
    moved_ports: tuple[tuple[int, int], ...]
    redis: Part
    workers: tuple[Part, ...]
    sidecars: tuple[Part, ...]
    routers: tuple[Part, ...]
    _report: Report = field(default=print, repr=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All processes."""
        return (self.redis, *self.workers, *self.sidecars, *self.routers)

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
        """
        fleet = cls._planned(config, report)
        try:
            async with asyncio.TaskGroup() as watchers:
                try:
                    await fleet.start(watchers)
                    yield fleet
                finally:
                    await fleet.stop()
        except BaseExceptionGroup as group:
            raise _first(group) from None

    @classmethod
    def _planned(cls, config: FleetConfig, report: Report) -> Self:
        shutil.rmtree(config.run_dir, ignore_errors=True)
        logs = config.run_dir / "logs"
        logs.mkdir(parents=True)
        ports = PortPicker(host=config.host)
        plan = make_plan(config, ports.pick)

        def part(name: str, command: Sequence[str], environment: dict[str, str]) -> Part:
            return Part(
                name=name,
                command=command,
                log_path=logs / f"{name}.log",
                environment=environment,
            )

        redis_command = embedded_redis.command(
            host=config.host, port=plan.redis_port, directory=config.run_dir
        )
        workers = enumerate(plan.workers, start=1)
        return cls(
            config=config,
            plan=plan,
            moved_ports=tuple(ports.moved),
            redis=part("redis", redis_command, {}),
            workers=tuple(part(f"worker-{i}", w.engine_command, {}) for i, w in workers),
            sidecars=tuple(
                part(f"sidecar-{i}", worker.sidecar_command, {})
                for i, worker in enumerate(plan.workers, start=1)
            ),
            routers=tuple(
                part(f"router-{i}", router.command, ROUTER_CACHE_ENVIRONMENT)
                for i, router in enumerate(plan.routers, start=1)
            ),
            _report=report,
        )

    # -- start ------------------------------------------------------------------------------------

    async def start(self, watchers: asyncio.TaskGroup) -> None:
        """Start every part, with a watcher each, and return when all are ready."""
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

        await launch(self.redis, lambda: embedded_redis.wait_ready(self.plan.redis_url))
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:

            async def launch_worker(number: int) -> None:
                plan = self.plan.workers[number]
                health = f"{plan.engine_url}/health"
                await launch(self.workers[number], lambda: _wait_ok(session, health))
                metrics = f"{plan.sidecar_url}/metrics"
                await launch(self.sidecars[number], lambda: _wait_ok(session, metrics))

            async def launch_router(number: int) -> None:
                url = self.plan.routers[number].admin_url
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

    # -- end --------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Routers finish their requests, then sidecars give their slots back, then the rest."""
        try:
            await _stop_all(self.routers, self.config.drain_s + STOP_GRACE_S)
            await _stop_all(self.sidecars, STOP_GRACE_S)
            await _stop_all(self.workers, STOP_GRACE_S)
            await _stop_all([self.redis], STOP_GRACE_S)
        finally:
            for part in self.parts:
                part.kill()


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
            pass
        await asyncio.sleep(POLL_S)


async def instances_seen(session: aiohttp.ClientSession, admin_url: str) -> int:
    """Instances a router can choose from now."""
    async with session.get(f"{admin_url}/fleet") as response:
        response.raise_for_status()
        body = await response.json()
    return sum(len(fleet["instances"]) for fleet in body["fleets"])


# -- python -m deploy.local -----------------------------------------------------------------------


def describe(fleet: LocalFleet) -> str:
    """Where everything is and a command to try, for a person."""
    plan = fleet.plan
    body = (
        f'{{"model": "{fleet.config.model_name}", "stream": true, "max_tokens": 16, '
        '"messages": [{"role": "user", "content": "Hello"}]}'
    )
    lines = [
        "",
        f"  routers   {plan.router_url}/v1 (OpenAI API), /fleet, /metrics",
        *(f"            {router.admin_url} (this process alone)" for router in plan.routers),
        *(f"  engine    {worker.engine_url}" for worker in plan.workers),
        *(f"  sidecar   {worker.sidecar_url}/metrics" for worker in plan.workers),
        f"  redis     {plan.redis_url}",
        f"  logs      {fleet.config.run_dir}/logs",
        "",
        "try:",
        f"  curl -N {plan.router_url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        "",
        "Ctrl-C drains the routers and stops everything; a second Ctrl-C does not wait.",
    ]
    return "\n".join(lines)


async def serve(config: FleetConfig) -> int:
    """Keep a fleet until cancelled.

    Raises:
        FleetError: a part did not come up or crashed.
    """

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"starting {config.workers} workers with sidecars, {config.routers} routers and Redis")
    try:
        async with LocalFleet.running(config, say) as fleet:
            say(describe(fleet))
            try:
                await asyncio.Event().wait()
            finally:
                say("draining and stopping")
    finally:
        say("stopped")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the fleet until a signal; exit code 0 then, 1 when a part failed."""
    config = auto_cli(
        FleetConfig,
        args=argv,
        prog="python -m deploy.local",
        default_env=True,
        env_prefix="TIMESTABLE_LOCAL",
        as_positional=False,
    )
    try:
        code = signals.run(lambda: serve(config))
    except FleetError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    return 0 if code in {128 + Signals.SIGINT, 128 + Signals.SIGTERM} else code


if __name__ == "__main__":
    sys.exit(main())
