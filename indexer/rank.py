"""One data-parallel rank of one engine process: its events, its table, its slot."""

import asyncio
import contextlib

import structlog

from indexer.block_table import BlockTable
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.records import FleetRecord, SlotFlag
from indexer.engine_metrics import EngineSample
from indexer.errors import MalformedBatch
from indexer.event_source import must_bind, reachable
from indexer.plan import RankPlan
from indexer.publisher import Publisher
from indexer.subscriber import Gap, Malformed, Received, Replayed, Subscriber
from indexer.telemetry import TableMeter, Telemetry
from indexer.vllm_events import AllBlocksCleared, decode_batch


class Rank:
    """Follows the events of a rank into its table and on to its publisher; keeps its lease."""

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
            counters = sample.counters
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
            self._telemetry.redis_failures.labels("heartbeat").inc()
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
