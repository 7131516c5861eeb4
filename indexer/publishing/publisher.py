"""Writes one instance's blocks to the index, under its slot.

Block changes are merged while a write is under way, so a busy engine never makes a queue. Whatever
is lost in Redis (slot swept, flush, failover) shows as a refusal; the instance then takes a new
slot and publishes its whole table again.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import structlog
from redis.exceptions import OutOfMemoryError

from indexer.contract import fleet_functions, functions, index_functions
from indexer.contract.call import Call
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import BLOCKS_PER_WRITE_MAX
from indexer.contract.link import Link
from indexer.contract.records import FleetRecord, InstanceRecord, SlotFlag
from indexer.errors import FleetChanged, FleetFull
from indexer.publishing.change_log import ChangeLog
from indexer.publishing.journal import Journal
from indexer.publishing.membership import Loss, Membership
from indexer.publishing.sweeper import SweeperLease
from indexer.table.changes import Changes, Delta, PendingChanges
from indexer.telemetry import Telemetry

CALLS_PER_FLUSH_MAX: Final = 32
BLOCKS_PER_FLUSH_MAX: Final = CALLS_PER_FLUSH_MAX * BLOCKS_PER_WRITE_MAX
"""Block changes in one round trip; between two of them newer changes are merged in."""

FULL_PAUSE_S: Final = 0.1
"""Until a server out of memory is asked again; removals have gone out meanwhile."""

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0


class Source(Protocol):
    """Where published blocks come from."""

    def published(self) -> list[BlockHash]:
        """All blocks to be published at this moment, parents before children."""
        ...

    def found_full(self) -> Delta:
        """Redis is out of memory: what gives way."""
        ...


class Publisher:
    """Publishes one instance: one data-parallel rank of one engine process."""

    def __init__(
        self,
        redis: Link,
        *,
        founding: FleetRecord,
        record: InstanceRecord,
        sweeper_lease: SweeperLease,
        telemetry: Telemetry,
        journal: Journal,
        state: Callable[[], SlotFlag],
    ) -> None:
        """Prepare an instance.

        Args:
            redis: link whose calls have a deadline.
            founding: record to found the fleet with, should there be none.
            record: what routers shall know about the instance.
            sweeper_lease: held while the fleet is founded.
            telemetry: metrics.
            journal: audit record of acknowledged writes.
            state: with which slots are taken: DRAINING or SlotFlag(0).
        """
        self._redis = redis
        self._telemetry = telemetry
        self._journal = journal
        self.instance_id = record.instance_id
        self._rank = str(record.data_parallel_rank or 0)
        self._log = structlog.get_logger().bind(rank=self._rank, instance_id=record.instance_id)
        self._pending = PendingChanges()
        self._unacknowledged: Changes | None = None
        self._stale: set[BlockHash] = set()
        self._source: Source | None = None
        self._flush_blocks = BLOCKS_PER_FLUSH_MAX
        self._wake = asyncio.Event()
        self.change_log = ChangeLog(time.monotonic())
        self.membership = Membership(
            redis,
            founding=founding,
            record=record,
            sweeper_lease=sweeper_lease,
            telemetry=telemetry,
            on_loss=self._wake.set,
            state=state,
        )

    def fleet(self) -> FleetRecord:
        """The fleet as this instance last joined it."""
        return self.membership.fleet

    async def leave(self) -> None:
        """Give the slot back, and first the blocks: they are known here, a sweep would search.

        What a deadline cuts off is swept by whoever has the sweeper's lease.
        """
        member = self.membership
        if not member.is_held:
            return
        fleet, slot, generation = member.fleet, member.slot, member.generation
        await member.close()
        removes = [
            index_functions.remove(fleet, slot, generation, blocks)
            for _, blocks in _pages(self._stored())
        ]
        for start in range(0, len(removes), CALLS_PER_FLUSH_MAX):
            await functions.run_all(self._redis, removes[start : start + CALLS_PER_FLUSH_MAX])
        await functions.run(self._redis, index_functions.sweep(fleet, slot, generation, 0, 0))
        await functions.run(self._redis, fleet_functions.free(fleet.fleet_id, slot, generation))
        self._log.info("slot_left", slot=slot, generation=generation)

    def _stored(self) -> list[BlockHash]:
        """Whatever Redis may hold of this instance, children before parents."""
        under_way = self._unacknowledged or Changes(removed=[], added=[])
        waiting = self._pending.take(len(self._pending)) or Changes(removed=[], added=[])
        stored = [*self._published(), *under_way.added, *under_way.removed, *waiting.removed]
        return list(reversed(dict.fromkeys(stored)))

    def _published(self) -> list[BlockHash]:
        return [] if self._source is None else self._source.published()

    # -- blocks -----------------------------------------------------------------------------------

    def offer(self, deltas: Sequence[Delta], engine_ts_s: float | None) -> None:
        """Take what one engine batch (None: something else) has changed; published by `run`.

        Raises:
            JournalFailed: the journal cannot be written.
        """
        now_s = time.monotonic()
        oldest_ts_s = self._pending.oldest_ts_s or engine_ts_s
        unseen = []
        for delta in deltas:
            unseen.append(self._pending.merge(delta))
            self._stale.difference_update(delta.added)
            self.change_log.note(now_s, delta.removed)
            self.change_log.note(now_s, delta.added)
        self._journal.write_unseen(
            self.instance_id, unseen, engine_ts_s=engine_ts_s, oldest_ts_s=oldest_ts_s
        )
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

    @property
    def pending_age_s(self) -> float:
        """Since the engine made the oldest batch not yet wholly acknowledged; 0 without one."""
        under_way = self._unacknowledged
        oldest_ts_s = None if under_way is None else under_way.oldest_ts_s
        if oldest_ts_s is None:
            oldest_ts_s = self._pending.oldest_ts_s
        return 0.0 if oldest_ts_s is None else max(0.0, time.time() - oldest_ts_s)

    def expect_removals(self) -> None:
        """From now on `is_stale`, until all removals known by now are in the index."""
        under_way = () if self._unacknowledged is None else self._unacknowledged.removed
        self._stale = {*self._pending.removed, *under_way}

    @property
    def is_stale(self) -> bool:
        """Whether the index may still claim what was gone when removals were to be expected."""
        return bool(self._stale)

    def on_their_way(self) -> Callable[[BlockHash], bool]:
        """Whether a block's change is not yet acknowledged; taken once, before the first offer."""
        under_way = self._unacknowledged or Changes(removed=[], added=[])
        sent = {*under_way.removed, *under_way.added}
        return lambda block: block in sent or block in self._pending

    async def run(self, source: Source) -> None:
        """Write what is offered, until cancelled; Redis may be away, or full, meanwhile.

        Args:
            source: where the blocks come from.

        Raises:
            FleetChanged: the fleet was founded anew with another block size.
        """
        self._source = source
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                if self.membership.lost is not None:
                    await self._rejoin(self.membership.lost)
                await self._flush()
                failures = 0
            except (*REDIS_WEATHER, FleetFull) as error:
                self._telemetry.redis_failures.labels("publish").inc()
                if failures == 0:
                    self._log.warning("publish_failed", error=str(error))
                failures += 1
                await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(failures, 10)))
                self._wake.set()

    async def _rejoin(self, cause: Loss) -> None:
        """Take a new slot and offer the whole table again."""
        member = self.membership
        before = member.fleet
        fleet = await member.join()
        if fleet.block_size_tokens != before.block_size_tokens:
            raise FleetChanged(
                f"block size was {before.block_size_tokens} tokens, is {fleet.block_size_tokens}"
            )
        self._unacknowledged = None
        self._pending.replace(self._published())
        self._stale.clear()
        self._telemetry.republishes.labels(self._rank, cause.value).inc()
        self._log.info("table_republished", blocks=len(self._pending), cause=cause.value)

    async def _flush(self) -> None:
        """Write until nothing is pending or the slot turns out to be lost."""
        member = self.membership
        while True:
            member.check_servers()
            if not member.is_held:
                return
            changes = self._unacknowledged or self._pending.take(self._flush_blocks)
            if changes is None:
                return
            self._unacknowledged = changes
            started_s = time.perf_counter()
            try:
                is_taken = await self._write(changes)
            except OutOfMemoryError:
                await self._give_way(changes)
                continue
            if not is_taken:
                member.lose(Loss.INDEX)
                return
            self._flush_blocks = min(2 * self._flush_blocks, BLOCKS_PER_FLUSH_MAX)
            self._unacknowledged = None
            self._acknowledged(changes, time.perf_counter() - started_s)

    async def _give_way(self, changes: Changes) -> None:
        """A server out of memory has carried a write out in part: removals, and the first stores.

        What was refused is merged with what comes, now that it is not known what the index has of
        it; removals go out at once, and what then fits.
        """
        self._telemetry.redis_failures.labels("publish").inc()
        self._unacknowledged = None
        self._flush_blocks = BLOCKS_PER_WRITE_MAX  # a long write takes memory by itself
        unseen = [self._pending.put_back(changes)]
        self._journal.write_unseen(self.instance_id, unseen, oldest_ts_s=changes.oldest_ts_s)
        delta = Delta() if self._source is None else self._source.found_full()
        self.offer([delta], None)
        if not delta.removed:
            await asyncio.sleep(FULL_PAUSE_S)

    async def _write(self, changes: Changes) -> bool:
        """One pipeline, executed in order; False when this instance may not write any more."""
        replies = await functions.run_all(self._redis, self._calls(changes))
        return all(reply == 1 for reply in replies)

    def _calls(self, changes: Changes) -> list[Call]:
        member = self.membership
        fleet, slot, generation = member.fleet, member.slot, member.generation
        removes = [
            index_functions.remove(fleet, slot, generation, blocks, after=after)
            for after, blocks in _pages(changes.removed)
        ]
        stores = [
            index_functions.store(fleet, slot, generation, blocks, after=after)
            for after, blocks in _pages(changes.added)
        ]
        return removes + stores

    def _acknowledged(self, changes: Changes, took_s: float) -> None:
        self._journal.write(self.instance_id, changes)
        self._stale.difference_update(changes.removed)
        now_s = time.monotonic()
        self.change_log.note(now_s, changes.removed)
        self.change_log.note(now_s, changes.added)
        self._telemetry.published.labels(self._rank, "removed").inc(len(changes.removed))
        self._telemetry.published.labels(self._rank, "added").inc(len(changes.added))
        self._telemetry.publish_s.labels(self._rank).observe(took_s)
        if changes.oldest_ts_s is not None:
            lag_s = max(0.0, time.time() - changes.oldest_ts_s)
            self._telemetry.lag_s.labels(self._rank).observe(lag_s)


def _pages(blocks: list[BlockHash]) -> Iterator[tuple[BlockHash | None, list[BlockHash]]]:
    """Blocks call by call, each with the last one of the call before."""
    for start in range(0, len(blocks), BLOCKS_PER_WRITE_MAX):
        after = blocks[start - 1] if start else None
        yield after, blocks[start : start + BLOCKS_PER_WRITE_MAX]
