"""Measuring policies one after the other against one fleet, each on cold engines."""

from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from rich.console import Console

from deploy.demo.cpu import CpuMark, busy_ratio
from deploy.demo.fleet_state import FleetState
from deploy.demo.readings import EngineReading, RouterLogs, read_engines
from deploy.demo.workload import VOCABULARY_TOKENS, Workload
from deploy.local.config import FleetConfig
from deploy.local.fleet import LocalFleet
from indexer.contract.link import connected
from loadgen.arrivals import constant
from loadgen.client import Target
from loadgen.progress import show_progress
from loadgen.records import RequestRecord
from loadgen.replay import replay

PROBE_TIMEOUT_S = 10.0
WARM_UP_REQUESTS = 8
WARM_UP_RATE = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """Everything seen while one policy was measured.

    Attributes:
        policy: its name.
        records: of the client, in real time.
        busy_s: simulated seconds each engine computed.
        lag_max_s: how far an engine ever was behind its timetable, real seconds.
        router_added_s: latency the router added, by request id.
        cpu_busy_ratio: of all processors, by anything; None where unknown.
    """

    policy: str
    records: tuple[RequestRecord, ...]
    busy_s: tuple[float, ...]
    lag_max_s: float
    router_added_s: dict[str, float]
    cpu_busy_ratio: float | None


@dataclass(slots=True, kw_only=True)
class Bench:
    """The running fleet and what measures it."""

    fleet: LocalFleet
    workload: Workload
    state: FleetState
    logs: RouterLogs
    console: Console

    async def measure(
        self, policy: str, prompts: Sequence[Sequence[int]], *, wait_for_previous_turn: bool
    ) -> PolicyRun:
        """Replay the workload with one policy on cold engines.

        Args:
            policy: its name.
            prompts: token ids of every prompt of the workload.
            wait_for_previous_turn: a follow-up is sent at its time and not before the answer to the
                turn before it; else at its time.

        Raises:
            FleetError: the engines cannot be made cold, or counters do not return to zero.
        """
        await self.state.make_cold(prompts)
        self.logs.added_s()  # what came before is not this run's
        before, cpu_before = await self._readings(), CpuMark.now()
        speedup = self.workload.speedup
        schedule = tuple(time_s / speedup for time_s in self.workload.schedule)
        with show_progress(f"{policy:>15}", self.console) as on_progress:
            replayed = await replay(
                self.workload.rows,
                schedule,
                self.target(policy),
                wait_for_previous_turn=wait_for_previous_turn,
                on_progress=on_progress,
            )
        cpu_after, after = CpuMark.now(), await self._readings()
        await self.state.wait_idle()
        return PolicyRun(
            policy=policy,
            records=replayed.records,
            busy_s=tuple(b.busy_s - a.busy_s for a, b in zip(before, after, strict=True)),
            lag_max_s=max(reading.lag_max_s for reading in after),
            router_added_s=self.logs.added_s(),
            cpu_busy_ratio=busy_ratio(cpu_before, cpu_after),
        )

    async def warm_up(self) -> None:
        """Let every process load what it loads on first use."""
        rows = self.workload.rows[:WARM_UP_REQUESTS]
        schedule = constant(len(rows), request_rate=WARM_UP_RATE)
        await replay(rows, schedule, self.target(self.fleet.config.policy))

    def target(self, policy: str) -> Target:
        """Where requests go, and that the answer shall tell the decision."""
        return Target(
            url=self.fleet.layout.router_url,
            model=self.fleet.config.model_name,
            vocabulary_tokens=VOCABULARY_TOKENS,
            headers={"x-timestable-policy": policy, "x-timestable-explain": "1"},
        )

    async def _readings(self) -> tuple[EngineReading, ...]:
        return await read_engines(self.state.session, self.state.engine_urls)


async def run_policies(
    policies: Sequence[str],
    config: FleetConfig,
    workload: Workload,
    console: Console,
    *,
    wait_for_previous_turn: bool = True,
) -> list[PolicyRun]:
    """Start the fleet, measure every policy, stop the fleet.

    Args:
        policies: in order; one named twice is measured twice.
        config: the fleet.
        workload: what is sent.
        console: where progress is shown.
        wait_for_previous_turn: see `Bench.measure`.

    Raises:
        FleetError: a part failed, engines cannot be made cold, or counters are not zero.
    """
    prompts = workload.prompts()
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    async with (
        LocalFleet.running(config, console.print) as fleet,
        aiohttp.ClientSession(timeout=timeout) as session,
        connected(fleet.layout.redis_url, deadline_s=PROBE_TIMEOUT_S) as link,
    ):
        bench = Bench(
            fleet=fleet,
            workload=workload,
            state=FleetState(
                redis=link,
                session=session,
                model_name=config.model_name,
                engine_urls=[worker.engine_url for worker in fleet.layout.workers],
            ),
            logs=RouterLogs(paths=[router.log_path for router in fleet.routers]),
            console=console,
        )
        await bench.warm_up()
        return [
            await bench.measure(policy, prompts, wait_for_previous_turn=wait_for_previous_turn)
            for policy in policies
        ]
