"""The sidecar of one engine, top to bottom.

wait for the engine, learn what it is, join the fleet         `Sidecar.run`, `Sidecar._serve`
per data-parallel rank: receive batch -> apply -> publish     `Rank.receive`
several times a second: look at the engine -> heartbeat       `Sidecar._watch`, `Rank.heartbeat`
a gap that no replay covers: forget the table, go on          `Rank.receive`
another engine process answers: leave the slots, start over   `Sidecar.run`
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import structlog
from redis.asyncio import Redis

from indexer.block_table import BlockTable
from indexer.config import SidecarConfig
from indexer.contract.limits import INSTANCE_LEASE_RENEW_S
from indexer.contract.records import EngineCounters, FleetRecord, SlotFlag
from indexer.engine_api import EngineApi, EngineInfo, adapters
from indexer.engine_metrics import EngineSample
from indexer.errors import (
    EngineRestarted,
    EngineUnreachable,
    EngineUnsuitable,
    FleetChanged,
    FleetFull,
    MalformedBatch,
)
from indexer.event_source import EventSource, must_bind, reachable
from indexer.journal import Journal
from indexer.plan import Plan, RankPlan, check_block_sizes, plan
from indexer.publisher import Publisher
from indexer.redis_client import REDIS_WEATHER
from indexer.subscriber import Gap, Malformed, Received, Replayed, Subscriber
from indexer.sweeper import Mark, Sweeper
from indexer.telemetry import TableMeter, Telemetry
from indexer.vllm_events import AllBlocksCleared, decode_batch

RETRY_S: Final = 0.25
"""Between two attempts at an engine or a Redis that is not there yet."""

WAITING_LOG_S: Final = 10.0
ADAPTERS_REFRESH_S: Final = 10.0
LEAVE_DEADLINE_S: Final = 5.0
"""For giving the slots back; what is left then is swept by another sidecar."""

_T = TypeVar("_T")


class Rank:
    """One data-parallel rank of one engine process: its events, its table, its slot."""

    def __init__(
        self,
        rank_plan: RankPlan,
        publisher: Publisher,
        fleet: FleetRecord,
        telemetry: Telemetry,
    ) -> None:
        self.record = rank_plan.record
        self.publisher = publisher
        self.source = rank_plan.source
        self.table = BlockTable(
            model_scope=fleet.model_scope, block_size_tokens=fleet.block_size_tokens
        )
        self._telemetry = telemetry
        self._label = str(rank_plan.source.rank)
        self._log = structlog.get_logger().bind(
            rank=self._label, instance_id=self.record.instance_id
        )
        self._meter = TableMeter(telemetry, self._label)
        self._subscriber: Subscriber | None = None
        self._is_renewed = False
        self._is_unverified = False  # the engine was silent: is it still the same process?
        self._sleep_level: int | None = None
        self._lost_at_stored: int | None = None  # stores applied when history was last lost

    # -- receive -> apply -> publish --------------------------------------------------------------

    async def receive(self, engine_host: str) -> None:
        """Follow the engine's events until cancelled.

        Raises:
            EngineRestarted: another engine process answers.
        """
        async with (
            await self._subscribe(engine_host) as subscriber,
            contextlib.aclosing(subscriber.receive()) as items,
        ):
            self._subscriber = subscriber
            async for item in items:
                match item:
                    case Received():
                        self._apply(item)
                    case Gap():
                        self._telemetry.gaps.labels(self._label).inc()
                        lost = item.resumes_at - item.first
                        self._telemetry.batches_lost.labels(self._label).inc(lost)
                        self._log.warning("history_lost", first=item.first, batches=lost)
                        self._lose_history()
                    case Malformed():
                        self._telemetry.events_malformed.labels(self._label).inc()
                        self._log.warning("message_malformed", frames=item.frames_count)
                    case Replayed():
                        self._note_replay(item)
                await asyncio.sleep(0)  # a long replay must not keep heartbeats waiting

    def _apply(self, item: Received) -> None:
        try:
            batch = decode_batch(item.payload)
        except MalformedBatch as error:
            self._telemetry.events_malformed.labels(self._label).inc()
            self._log.warning("batch_malformed", sequence=item.sequence, error=str(error))
            return
        if item.sequence == 0:
            self._lost_at_stored = None
        deltas = []
        for event in batch.events:
            deltas.append(self.table.apply(event))
            if isinstance(event, AllBlocksCleared):
                self._lost_at_stored = None
        self.publisher.offer(deltas, batch.ts_s)
        self._telemetry.batches.labels(self._label).inc()
        if batch.unknown_count:
            self._telemetry.events_unknown.labels(self._label).inc(batch.unknown_count)
        if batch.malformed_count:
            self._telemetry.events_malformed.labels(self._label).inc(batch.malformed_count)
            self._log.warning("events_malformed", sequence=item.sequence)

    def _lose_history(self) -> None:
        """Any block may have gone unnoticed: nothing known before is provably still there."""
        self.publisher.offer([self.table.clear()], None)
        self._lost_at_stored = self.table.stored_count

    def _note_replay(self, item: Replayed) -> None:
        self._is_unverified = self._is_unverified and item.failed and not item.given_up
        outcome = "failed" if item.failed else "complete"
        self._telemetry.replays.labels(self._label, outcome).inc()
        if item.given_up:
            self._telemetry.replay_available.labels(self._label).set(0)
            self._log.warning(
                "replay_given_up",
                endpoint=self.source.replay_endpoint,
                effect="the replay socket does not answer: a gap in the events clears this index",
            )

    async def _subscribe(self, engine_host: str) -> Subscriber:
        source = self.source
        endpoint = reachable(source.endpoint, engine_host)
        replay = source.replay_endpoint and reachable(source.replay_endpoint, engine_host)
        bind = await must_bind(source.endpoint)
        self._telemetry.replay_available.labels(self._label).set(replay is not None)
        self._log.info("events_subscribed", endpoint=endpoint, bind=bind, replay_endpoint=replay)
        if replay is None:
            self._lost_at_stored = 0  # until the engine's first batch is seen
            self._log.warning(
                "replay_unavailable",
                effect="a gap in the events clears this index",
                remedy="set replay_endpoint in the engine's --kv-events-config",
            )
        return Subscriber(endpoint=endpoint, bind=bind, replay_endpoint=replay, topic=source.topic)

    # -- heartbeat --------------------------------------------------------------------------------

    async def heartbeat(self, sample: EngineSample | None) -> None:
        """Renew the lease; the engine has just answered, and is the process it was.

        Args:
            sample: its load; None when it tells none for this rank.
        """
        if self._is_unverified:
            return
        state, counters = SlotFlag(0), None
        if sample is not None:
            counters = EngineCounters(
                running_count=sample.running_count,
                waiting_count=sample.waiting_count,
                kv_usage_ratio=sample.kv_usage_ratio,
            )
            if sample.sleep_level is not None:
                state = SlotFlag.SLEEPING
            if sample.sleep_level != self._sleep_level:
                self._sleep_level = sample.sleep_level
                self._log.info("sleep_level_changed", level=sample.sleep_level)
            if sample.sleep_level and len(self.table):  # from level 1 on the cache is discarded
                self.publisher.offer([self.table.clear()], None)
        try:
            await self.publisher.heartbeat(state, counters)
        except REDIS_WEATHER as error:
            self._telemetry.redis_failures.labels(self._label, "heartbeat").inc()
            self._renewing(False, str(error))
        else:
            self._renewing(True, "")

    def stop_renewing(self) -> None:
        """The engine does not answer: its lease runs out unless it comes back as it was."""
        if self._is_renewed and self._subscriber is not None:
            self._is_unverified = self._subscriber.check()
        self._renewing(False, "the engine does not answer")

    def _renewing(self, renewed: bool, reason: str) -> None:
        if renewed != self._is_renewed:
            self._is_renewed = renewed
            self._telemetry.lease_held.labels(self._label).set(renewed)
            self._log.info("lease_renewed" if renewed else "lease_not_renewed", reason=reason)

    def export(self) -> None:
        """Bring the table's metrics up to date."""
        missing = self._lost_at_stored is not None
        stored_since = self.table.stored_count - (self._lost_at_stored or 0)
        capacity = self.record.capacity_blocks or max(stored_since, 1)
        completeness_ratio = min(1.0, stored_since / capacity) if missing else 1.0
        self._meter.export(self.table, self.publisher.pending_count, completeness_ratio)


class Sidecar:
    """Everything one process does for one engine."""

    def __init__(
        self, config: SidecarConfig, api: EngineApi, redis: Redis, *, telemetry: Telemetry
    ) -> None:
        self._config = config
        self._api = api
        self._redis = redis
        self._telemetry = telemetry
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Serve one engine process after the other until cancelled, then leave.

        Raises:
            EngineUnsuitable: the engine cannot be indexed as it is.
            JournalFailed: the journal cannot be written.
        """
        with contextlib.closing(Journal(self._config.journal_path)) as journal:
            while True:
                engine = await self._patiently("engine", self._api.describe, EngineUnreachable)
                try:
                    await self._serve(engine, plan(self._config, engine), journal)
                except* (EngineRestarted, FleetChanged) as reasons:
                    self._telemetry.restarts.labels("").inc()
                    self._log.warning("engine_left", reason=str(reasons.exceptions[0]))

    async def _serve(self, engine: EngineInfo, engine_plan: Plan, journal: Journal) -> None:
        """Index one engine process: an instance for each of its ranks."""
        mark = Mark(self._redis, engine_plan.wish.fleet_id)
        publishers = [
            Publisher(
                self._redis,
                wish=engine_plan.wish,
                record=rank_plan.record,
                mark=mark,
                telemetry=self._telemetry,
                journal=journal,
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
                    tasks.create_task(rank.receive(self._api.host))
                    tasks.create_task(rank.publisher.run(rank.table.published))
                tasks.create_task(self._watch(ranks, engine.adapters))
                sweeper = Sweeper(self._redis, mark, self._telemetry)
                tasks.create_task(sweeper.run(publishers[0].fleet))
        finally:
            await self._leave(publishers, mark)

    async def _join(self, rank_plan: RankPlan, publisher: Publisher) -> Rank:
        fleet = await self._patiently("redis", publisher.join, *REDIS_WEATHER, FleetFull)
        check_block_sizes(rank_plan.record.block_size_tokens, fleet.block_size_tokens)
        return Rank(rank_plan, publisher, fleet, self._telemetry)

    async def _watch(self, ranks: Sequence[Rank], known_adapters: tuple[str, ...]) -> None:
        """Look at the engine again and again; renew the leases while it answers."""
        loop = asyncio.get_running_loop()
        checked_s = refreshed_s = loop.time()
        is_healthy = answered = True
        while True:
            started_s = loop.time()
            try:
                if started_s - checked_s >= INSTANCE_LEASE_RENEW_S or not is_healthy:
                    checked_s, is_healthy = started_s, await self._api.is_healthy()
                samples = await self._api.samples()
                if started_s - refreshed_s >= ADAPTERS_REFRESH_S:
                    refreshed_s = started_s
                    known_adapters = await self._announce(ranks, known_adapters)
                answers = is_healthy
            except (EngineUnreachable, EngineUnsuitable) as error:
                answers, samples = False, {}
                self._telemetry.scrape_failures.labels("").inc()
                if answered:
                    self._log.warning("engine_silent", error=str(error))
            answered = answers
            for rank in ranks:
                if answers:
                    await rank.heartbeat(_sample_of(samples, rank.source, len(ranks)))
                else:
                    rank.stop_renewing()
                rank.export()
            spent_s = loop.time() - started_s
            await asyncio.sleep(max(0.0, self._config.scrape_interval_s - spent_s))

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
                    await rank.publisher.announce(rank.record)
                except REDIS_WEATHER:
                    return known_adapters  # told again at the next refresh
        return now

    async def _leave(self, publishers: Sequence[Publisher], mark: Mark) -> None:
        """Give the slots back, as far as Redis lets us in time."""
        try:
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                for publisher in publishers:
                    await publisher.leave()
                await mark.release()
        except (*REDIS_WEATHER, TimeoutError) as error:
            self._log.warning("leave_failed", error=str(error) or type(error).__name__)

    async def _patiently(
        self, what: str, attempt: Callable[[], Awaitable[_T]], *weather: type[Exception]
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
                    self._log.info(f"{what}_awaited", reason=str(error))
            await asyncio.sleep(RETRY_S)


def _sample_of(
    samples: Mapping[str, EngineSample], source: EventSource, ranks_count: int
) -> EngineSample | None:
    """A rank's sample; a lone rank's whatever its label."""
    if ranks_count == 1 and len(samples) == 1:
        return next(iter(samples.values()))
    return samples.get(str(source.rank))
