"""The only writer of the index: one instance's slot, its lease, and its blocks.

Block changes are merged while a write is under way, so a busy engine never makes a queue. Whatever
is lost in Redis (slot swept, flush, failover) shows as a refusal; the instance then takes a new
slot and publishes its whole table again.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog
from redis.asyncio import Redis

from indexer.block_table import Delta
from indexer.changes import Changes, PendingChanges
from indexer.contract import functions, keys
from indexer.contract.functions import REDIS_WEATHER, Call
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import BLOCKS_PER_WRITE_MAX, DIRECTORY_TTL_S
from indexer.contract.records import EngineCounters, FleetRecord, InstanceRecord, SlotFlag
from indexer.errors import FleetChanged, FleetFull
from indexer.journal import Journal
from indexer.redis_client import run_all
from indexer.sweeper import SweeperLease, found
from indexer.telemetry import Telemetry

CALLS_PER_FLUSH_MAX: Final = 32
BLOCKS_PER_FLUSH_MAX: Final = CALLS_PER_FLUSH_MAX * BLOCKS_PER_WRITE_MAX
"""Block changes in one round trip; between two of them newer changes are merged in."""

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
DIRECTORY_RENEW_S: Final = DIRECTORY_TTL_S / 10

assert DIRECTORY_RENEW_S * 3 <= DIRECTORY_TTL_S, "two lost renewals would lose the fleet's listing"


class Publisher:
    """Publishes one instance: one data-parallel rank of one engine process."""

    def __init__(
        self,
        redis: Redis,
        *,
        founding: FleetRecord,
        record: InstanceRecord,
        sweeper_lease: SweeperLease,
        telemetry: Telemetry,
        journal: Journal,
    ) -> None:
        """Prepare an instance.

        Args:
            redis: client whose calls have a deadline.
            founding: record to found the fleet with, should there be none.
            record: what routers shall know about the instance.
            sweeper_lease: held while the fleet is founded.
            telemetry: metrics.
            journal: audit record of acknowledged writes.
        """
        self._fleet: FleetRecord | None = None
        self._redis = redis
        self._founding = founding
        self._record = record
        self._sweeper_lease = sweeper_lease
        self._telemetry = telemetry
        self._journal = journal
        self._rank = str(record.data_parallel_rank or 0)
        self._log = structlog.get_logger().bind(rank=self._rank, instance_id=record.instance_id)
        self._slot = SlotIndex(-1)
        self._generation = 0
        self._is_lost = False
        self._listed_s = float("-inf")
        self._pending = PendingChanges()
        self._unacknowledged: Changes | None = None
        self._published: Callable[[], list[BlockHash]] = list
        self._wake = asyncio.Event()

    def fleet(self) -> FleetRecord:
        """The fleet as this instance last joined it."""
        assert self._fleet is not None, "not joined"
        return self._fleet

    # -- membership -------------------------------------------------------------------------------

    async def join(self) -> FleetRecord:
        """Take a slot.

        Raises:
            FleetFull: there is none.
        """
        fleet = await found(self._redis, self._founding, self._sweeper_lease)
        joining = functions.join(fleet.fleet_id, self._record.encode())
        reply = await functions.run(self._redis, joining)
        if not reply:
            raise FleetFull(f"all slots of fleet {fleet.model_scope!r} are taken")
        slot, generation = SlotIndex(int(reply[0])), int(reply[1])
        opening = functions.open_slot(fleet.fleet_id, slot, generation)
        if not await functions.run(self._redis, opening):
            await functions.run(self._redis, functions.close(fleet.fleet_id, slot, generation, -1))
            raise FleetFull(f"slot {slot} was left over from an earlier fleet")
        self._fleet, self._slot, self._generation = fleet, slot, generation
        self._is_lost = False
        await self._list()
        self._log.info(
            "slot_taken",
            fleet_id=fleet.fleet_id,
            model_scope=fleet.model_scope,
            slot=slot,
            generation=generation,
            epoch=fleet.epoch,
        )
        return fleet

    async def heartbeat(self, state: SlotFlag, counters: EngineCounters | None) -> None:
        """Renew the lease and publish the engine's counters."""
        if self._fleet is None or self._is_lost:
            return
        beat = functions.heartbeat(
            self._fleet, self._slot, self._generation, state=state, counters=counters
        )
        if not await functions.run(self._redis, beat):
            self._lose("lease")
            return
        if time.monotonic() - self._listed_s > DIRECTORY_RENEW_S:
            await self._list()

    async def announce(self, record: InstanceRecord) -> None:
        """Replace what routers know about the instance."""
        self._record = record
        if self._fleet is not None and not self._is_lost:
            announcing = functions.announce(
                self._fleet.fleet_id, self._slot, self._generation, record.encode()
            )
            if not await functions.run(self._redis, announcing):
                self._lose("record")

    async def leave(self) -> None:
        """Give the slot back, and first the blocks: they are known here, a sweep would search.

        What a deadline cuts off is swept by whoever has the sweeper's lease.
        """
        if self._fleet is None or self._is_lost:
            return
        fleet, slot, generation = self._fleet, self._slot, self._generation
        self._is_lost = True
        await functions.run(self._redis, functions.close(fleet.fleet_id, slot, generation, -1))
        removes = [
            functions.remove(fleet, slot, generation, blocks) for blocks in _pages(self._stored())
        ]
        for start in range(0, len(removes), CALLS_PER_FLUSH_MAX):
            await run_all(self._redis, removes[start : start + CALLS_PER_FLUSH_MAX])
        await functions.run(self._redis, functions.sweep(fleet.fleet_id, slot, generation, 0, 0))
        await functions.run(self._redis, functions.free(fleet.fleet_id, slot, generation))
        self._log.info("slot_left", slot=slot, generation=generation)

    def _stored(self) -> list[BlockHash]:
        """Whatever Redis may hold of this instance, children before parents."""
        under_way = self._unacknowledged or Changes(removed=[], added=[])
        waiting = self._pending.take(len(self._pending)) or Changes(removed=[], added=[])
        stored = [*self._published(), *under_way.added, *under_way.removed, *waiting.removed]
        return list(reversed(dict.fromkeys(stored)))

    async def _list(self) -> None:
        """Keep the fleet in the directory."""
        await self._redis.sadd(keys.directory(), self._founding.fleet_id)
        await self._redis.expire(keys.directory(), DIRECTORY_TTL_S)
        self._listed_s = time.monotonic()

    def _lose(self, what: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._log.warning("slot_lost", slot=self._slot, generation=self._generation, what=what)
        self._wake.set()

    # -- blocks -----------------------------------------------------------------------------------

    def offer(self, deltas: Sequence[Delta], engine_ts_s: float | None) -> None:
        """Take what one engine batch (None: something else) has changed; published by `run`."""
        for delta in deltas:
            self._pending.merge(delta)
        if engine_ts_s is not None:
            self._pending.cover(engine_ts_s)
        if self._pending:
            self._wake.set()

    @property
    def pending_count(self) -> int:
        """Block changes not yet acknowledged."""
        under_way = self._unacknowledged
        return len(self._pending) + (
            len(under_way.removed) + len(under_way.added) if under_way is not None else 0
        )

    async def run(self, published: Callable[[], list[BlockHash]]) -> None:
        """Write what is offered, until cancelled; Redis may be away meanwhile.

        Args:
            published: all blocks to be published at this moment, parents before children.

        Raises:
            FleetChanged: the fleet was founded anew with another block size.
        """
        self._published = published
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                if self._is_lost:
                    await self._rejoin()
                await self._flush()
                failures = 0
            except (*REDIS_WEATHER, FleetFull) as error:
                self._telemetry.redis_failures.labels("publish").inc()
                if failures == 0:
                    self._log.warning("publish_failed", error=str(error))
                failures += 1
                await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(failures, 10)))
                self._wake.set()

    async def _rejoin(self) -> None:
        """Take a new slot and offer the whole table again."""
        before = self._fleet
        assert before is not None
        # The old slot may still be ours where only index keys were lost.
        closing = functions.close(before.fleet_id, self._slot, self._generation, -1)
        await functions.run(self._redis, closing)
        fleet = await self.join()
        if fleet.block_size_tokens != before.block_size_tokens:
            raise FleetChanged(
                f"block size was {before.block_size_tokens} tokens, is {fleet.block_size_tokens}"
            )
        self._unacknowledged = None
        self._pending.replace(self._published())
        self._telemetry.republishes.labels(self._rank).inc()
        self._log.info("table_republished", blocks=len(self._pending))

    async def _flush(self) -> None:
        """Write until nothing is pending or the slot turns out to be lost."""
        while not self._is_lost:
            changes = self._unacknowledged or self._pending.take(BLOCKS_PER_FLUSH_MAX)
            if changes is None:
                return
            self._unacknowledged = changes
            started_s = time.perf_counter()
            if not await self._write(changes):
                self._lose("index")
                return
            self._unacknowledged = None
            self._acknowledged(changes, time.perf_counter() - started_s)

    async def _write(self, changes: Changes) -> bool:
        """One pipeline, executed in order; False when this instance may not write any more."""
        return all(await run_all(self._redis, self._calls(changes)))

    def _calls(self, changes: Changes) -> list[Call]:
        assert self._fleet is not None
        fleet, slot, generation = self._fleet, self._slot, self._generation
        removes = [
            functions.remove(fleet, slot, generation, blocks) for blocks in _pages(changes.removed)
        ]
        stores = [
            functions.store(fleet, slot, generation, blocks) for blocks in _pages(changes.added)
        ]
        return removes + stores

    def _acknowledged(self, changes: Changes, took_s: float) -> None:
        self._journal.write(self._record.instance_id, changes)
        self._telemetry.published.labels(self._rank, "removed").inc(len(changes.removed))
        self._telemetry.published.labels(self._rank, "added").inc(len(changes.added))
        self._telemetry.publish_s.labels(self._rank).observe(took_s)
        if changes.oldest_ts_s is not None:
            lag_s = max(0.0, time.time() - changes.oldest_ts_s)
            self._telemetry.lag_s.labels(self._rank).observe(lag_s)


def _pages(blocks: list[BlockHash]) -> Iterator[list[BlockHash]]:
    for start in range(0, len(blocks), BLOCKS_PER_WRITE_MAX):
        yield blocks[start : start + BLOCKS_PER_WRITE_MAX]
