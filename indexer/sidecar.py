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

from indexer.block_table import BlockTable, Delta
from indexer.config import SidecarConfig
from indexer.contract.functions import EngineCounters
from indexer.contract.limits import INSTANCE_LEASE_RENEW_S
from indexer.contract.records import FleetRecord, InstanceRecord, SlotFlag
from indexer.engine_api import EngineApi, EngineInfo, adapters
from indexer.engine_metrics import EngineSample
from indexer.errors import (
    REDIS_WEATHER,
    EngineRestarted,
    EngineUnreachable,
    FleetChanged,
    FleetFull,
    MalformedBatch,
)
from indexer.event_source import EventSource, must_bind, reachable
from indexer.journal import Journal
from indexer.plan import Plan, RankPlan, check_block_sizes, plan
from indexer.publisher import Publisher
from indexer.subscriber import Gap, Malformed, Received, Replayed, Subscriber
from indexer.sweeper import Mark, Sweeper
from indexer.telemetry import Telemetry
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
        self._sleep_level: int | None = None
        self._lost_at_stored: int | None = None  # stores applied when history was last lost

    # -- receive -> apply -> publish --------------------------------------------------------------

    async def receive(self, engine_host: str) -> None:
        """Follow the engine's events until cancelled.

        Raises:
            EngineRestarted: another engine process answers.
        """
        async with await self._subscribe(engine_host) as subscriber:
            async with contextlib.aclosing(subscriber.receive()) as items:
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
        endpoint = reachable(self.source.endpoint, engine_host)
        replay = self.source.replay_endpoint
        bind = await must_bind(endpoint)
        self._telemetry.replay_available.labels(self._label).set(replay is not None)
        self._log.info("events_subscribed", endpoint=endpoint, bind=bind, replay_endpoint=replay)
        if replay is None:
            self._log.warning(
                "replay_unavailable",
                effect="a gap in the events clears this index",
                remedy="set replay_endpoint in the engine's --kv-events-config",
            )
        return Subscriber(
            endpoint=endpoint,
            bind=bind,
            replay_endpoint=replay and reachable(replay, engine_host),
            topic=self.source.topic,
        )

    # -- heartbeat --------------------------------------------------------------------------------

    async def heartbeat(self, sample: EngineSample | None) -> None:
        """Renew the lease; the engine has just answered.

        Args:
            sample: its load; None when it tells none for this rank.
        """
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
                if sample.sleep_level:  # from level 1 on the cache is discarded
                    self.publisher.offer([self.table.clear()], None)
        try:
            await self.publisher.heartbeat(state, counters)
            self._telemetry.lease_held.labels(self._label).set(1)
        except REDIS_WEATHER:
            self._telemetry.redis_failures.labels(self._label, "heartbeat").inc()

    def stop_renewing(self) -> None:
        """The engine does not answer: its lease runs out unless it comes back."""
        self._telemetry.lease_held.labels(self._label).set(0)

    def export(self) -> None:
        """Bring gauges up to date."""
        table, label, telemetry = self.table, self._label, self._telemetry
        telemetry.table_blocks.labels(label).set(len(table))
        telemetry.waiting_blocks.labels(label).set(table.unplaced_count)
        telemetry.index_blocks.labels(label).set(table.published_count)
        telemetry.pending_blocks.labels(label).set(self.publisher.pending_count)
        telemetry.completeness.labels(label).set(self._completeness_ratio())

    def _completeness_ratio(self) -> float:
        """1 while no batch is missing, else the share of the cache that was stored since."""
        if self._lost_at_stored is None:
            return 1.0
        stored = self.table.stored_count - self._lost_at_stored
        return min(1.0, stored / (self.record.capacity_blocks or max(stored, 1)))
