"""The sidecar of one engine, top to bottom.

wait for the engine, learn what it is, join the fleet         `Sidecar.run`, `Sidecar._serve`
per data-parallel rank: receive batch -> apply -> publish     `Follower.receive`
several times a second: look at the engine -> heartbeat       `Sidecar._watch`, `Rank.heartbeat`
what routers found to differ comes back with its answer       `Judge.judge`
a gap that no replay covers: doubt every block, go on         `Holdings.lose`
another engine process answers: leave the slots, start over   `Sidecar.run`
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import structlog

from indexer.approximate.learner import LEARNED_BLOCKS_MAX
from indexer.checkpoint import Subject, check_directory
from indexer.checkpoint_keeper import CheckpointKeeper
from indexer.config import SidecarConfig
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.link import Link
from indexer.contract.records import FleetRecord
from indexer.draining import Drain
from indexer.engine.engine_api import EngineApi, EngineInfo, adapters
from indexer.engine.engine_metrics import EngineSample
from indexer.engine.event_source import EventSource, reachable
from indexer.engine.prefill_probe import measured_prefill
from indexer.engine.step_statistics import StepStatistics
from indexer.errors import (
    EngineRestarted,
    EngineUnreachable,
    EngineUnsuitable,
    FleetChanged,
    FleetFull,
)
from indexer.plan import Plan, RankPlan, check_block_sizes, plan
from indexer.publishing.journal import Journal
from indexer.publishing.memory import MemoryKeeper
from indexer.publishing.publisher import Publisher
from indexer.publishing.sweeper import Sweeper, SweeperLease
from indexer.rank import Rank
from indexer.telemetry import Telemetry

REDIS_DEADLINE_S: Final = 2.0
"""For one command, or one batch of them, of the link that a sidecar is given."""

RETRY_S: Final = 0.25
"""Between two attempts at an engine or a Redis that is not there yet."""

WAITING_LOG_S: Final = 10.0
HEALTH_CHECK_S: Final = 1.0
"""Between two health checks of an engine that works; one that does not is asked every time."""

ADAPTERS_REFRESH_S: Final = 10.0
LEAVE_DEADLINE_S: Final = 5.0
"""For giving the slots back; what is left then is swept by another sidecar."""

_T = TypeVar("_T")


class Sidecar:
    """Everything one process does for one engine."""

    def __init__(
        self,
        config: SidecarConfig,
        api: EngineApi,
        redis: Link,
        *,
        telemetry: Telemetry,
        drain: Drain,
        interval_s: Callable[[], float] | None = None,
        learned_blocks_max: Callable[[], int] = lambda: LEARNED_BLOCKS_MAX,
    ) -> None:
        """Nothing is done yet.

        Args:
            config: what the operator wants.
            api: of the engine.
            redis: link whose calls have a deadline.
            telemetry: metrics.
            drain: whether it takes requests.
            interval_s: between two looks at the engine, asked each time; the configured one when
                not given.
            learned_blocks_max: of each rank, for want of memory here; asked each time.
        """
        self._learned_blocks_max = learned_blocks_max
        self._interval_s = interval_s or (lambda: config.scrape_interval_s)
        self._config = config
        self._api = api
        self._redis = redis
        self._telemetry = telemetry
        self._drain = drain
        self._log = structlog.get_logger()
        self._steps: StepStatistics | None = None

    async def run(self) -> None:
        """Serve one engine process after the other until cancelled, then leave.

        Raises:
            EngineUnsuitable: the engine cannot be indexed as it is.
            JournalFailed: the journal cannot be written.
            CheckpointUnwritable: checkpoints cannot be kept where they shall be.
        """
        if self._config.checkpoint_path is not None:
            check_directory(self._config.checkpoint_path)
        measured_tokens_per_s: float | None = None
        with contextlib.closing(Journal(self._config.journal_path)) as journal:
            while True:
                engine = await self._patiently(
                    "engine_awaited", self._api.describe, EngineUnreachable
                )
                rate = self._config.prefill_tokens_per_s or measured_tokens_per_s
                if rate is None and self._config.measure_prefill:
                    rate = measured_tokens_per_s = await measured_prefill(self._api, engine)
                engine_plan = plan(self._config, engine, prefill_tokens_per_s=rate)
                try:
                    await self._serve(engine, engine_plan, journal)
                except* (EngineRestarted, FleetChanged) as reasons:
                    self._telemetry.restarts.inc()
                    self._log.warning("engine_left", reason=str(reasons.exceptions[0]))
                    if reasons.subgroup(EngineRestarted):  # else it is as fast as it was, and busy
                        measured_tokens_per_s = None

    async def _serve(self, engine: EngineInfo, engine_plan: Plan, journal: Journal) -> None:
        """Index one engine process: an instance for each of its ranks."""
        self._drain.expect(str(one.source.rank) for one in engine_plan.ranks)
        lease = SweeperLease(self._redis, engine_plan.founding.fleet_id)
        publishers = [
            Publisher(
                self._redis,
                founding=engine_plan.founding,
                record=rank_plan.record,
                sweeper_lease=lease,
                telemetry=self._telemetry,
                journal=journal,
                state=self._drain.flags,
            )
            for rank_plan in engine_plan.ranks
        ]
        try:
            ranks = [
                await self._join(rank_plan, publisher)
                for rank_plan, publisher in zip(engine_plan.ranks, publishers, strict=True)
            ]
            async with asyncio.TaskGroup() as tasks:
                for rank in ranks:
                    tasks.create_task(rank.follower.receive(self._api.host))
                    tasks.create_task(rank.publisher.run(rank))
                    tasks.create_task(rank.follower.keep_checkpoint())
                if self._config.step_endpoint is not None:
                    endpoint = reachable(self._config.step_endpoint, self._api.host)
                    self._steps = StepStatistics(endpoint, self._telemetry)
                    tasks.create_task(self._steps.receive())
                tasks.create_task(self._watch(ranks, engine.adapters))
                memory = MemoryKeeper(
                    self._redis, self._telemetry, index_bytes_max=self._config.index_bytes_max
                )
                sweeper = Sweeper(self._redis, lease, memory, self._telemetry)
                tasks.create_task(sweeper.run(publishers[0].fleet))
        finally:
            await self._leave(publishers, lease)

    async def _join(self, rank_plan: RankPlan, publisher: Publisher) -> Rank:
        join = publisher.membership.join
        fleet = await self._patiently("slot_awaited", join, *REDIS_WEATHER, FleetFull)
        check_block_sizes(rank_plan.record.block_size_tokens, fleet.block_size_tokens)
        keeper = self._checkpoint_keeper(rank_plan, fleet)
        return Rank(
            rank_plan,
            publisher,
            fleet,
            self._telemetry,
            keeper,
            drain=self._drain,
            learned_blocks_max=self._learned_blocks_max,
        )

    def _checkpoint_keeper(
        self, rank_plan: RankPlan, fleet: FleetRecord
    ) -> CheckpointKeeper | None:
        directory, record = self._config.checkpoint_path, rank_plan.record
        if directory is None:
            return None
        subject = Subject(
            url=record.url,
            rank=rank_plan.source.rank,
            model_scope=fleet.model_scope,
            model_root=record.model_root,
            block_size_tokens=fleet.block_size_tokens,
            engine_block_size_tokens=record.block_size_tokens,
        )
        return CheckpointKeeper(
            directory, subject, self._telemetry, rank=str(rank_plan.source.rank)
        )

    async def _watch(self, ranks: Sequence[Rank], known_adapters: tuple[str, ...]) -> None:
        """Look at the engine again and again; renew the leases while it answers."""
        loop = asyncio.get_running_loop()
        checked_s = refreshed_s = loop.time()
        is_healthy = answered = True
        while True:
            started_s, asked_s = loop.time(), time.monotonic()
            try:
                if started_s - checked_s >= HEALTH_CHECK_S or not is_healthy:
                    checked_s, is_healthy = started_s, await self._api.is_healthy()
                samples = await self._samples()
                if started_s - refreshed_s >= ADAPTERS_REFRESH_S:
                    refreshed_s = started_s
                    known_adapters = await self._announce(ranks, known_adapters)
                answers = is_healthy
            except (EngineUnreachable, EngineUnsuitable) as error:
                answers, samples = False, {}
                self._telemetry.scrape_failures.inc()
                if answered:
                    self._log.warning("engine_silent", error=str(error))
            answered = answers
            for rank in ranks:
                if answers:
                    await rank.heartbeat(_sample_of(samples, rank.source, len(ranks)), asked_s)
                else:
                    rank.stop_renewing()
                rank.export()
            spent_s = loop.time() - started_s
            await self._pause(max(0.0, self._interval_s() - spent_s))

    async def _samples(self) -> dict[str, EngineSample]:
        if self._steps is not None:
            return await self._steps.samples(self._api)
        return await self._api.samples()

    async def _pause(self, seconds: float) -> None:
        """Until the next look; an engine that tells its steps shortens it."""
        if self._steps is not None:
            await self._steps.pause(seconds)
        else:
            await asyncio.sleep(seconds)

    async def _announce(
        self, ranks: Sequence[Rank], known_adapters: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Tell routers when adapters were loaded or unloaded."""
        now = adapters(await self._api.models())
        if now != known_adapters:
            self._log.info("adapters_changed", adapters=now)
            for rank in ranks:
                rank.record = replace(rank.record, adapters=list(now))
                try:
                    await rank.publisher.membership.announce(rank.record)
                except REDIS_WEATHER:
                    return known_adapters  # told again at the next refresh
        return now

    async def _leave(self, publishers: Sequence[Publisher], lease: SweeperLease) -> None:
        """Give the slots back, as far as Redis lets us in time."""
        try:
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                for publisher in publishers:
                    await publisher.leave()
                await lease.release()
        except (*REDIS_WEATHER, TimeoutError) as error:
            self._log.warning("leave_failed", error=str(error) or type(error).__name__)

    async def _patiently(
        self, event: str, attempt: Callable[[], Awaitable[_T]], *weather: type[Exception]
    ) -> _T:
        """Repeat until it works; say now and then what is being waited for."""
        loop = asyncio.get_running_loop()
        said_s = float("-inf")
        while True:
            try:
                return await attempt()
            except weather as error:
                if loop.time() - said_s >= WAITING_LOG_S:
                    said_s = loop.time()
                    self._log.info(event, reason=str(error))
            await asyncio.sleep(max(RETRY_S, self._interval_s()))


def _sample_of(
    samples: Mapping[str, EngineSample], source: EventSource, ranks_count: int
) -> EngineSample | None:
    """A rank's sample; a lone rank's whatever its label."""
    if ranks_count == 1 and len(samples) == 1:
        return next(iter(samples.values()))
    return samples.get(str(source.rank))
