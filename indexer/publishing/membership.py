"""One instance's slot in its fleet: taken, kept by heartbeats, lost, given back."""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import structlog

from indexer.contract import fleet_functions, functions, index_functions, keys, upkeep
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import DIRECTORY_TTL_S, SLOTS_PER_PARTITION_MAX
from indexer.contract.link import Link
from indexer.contract.records import (
    EngineCounters,
    FleetRecord,
    HeartbeatReply,
    IndexCounters,
    InstanceRecord,
    SlotFlag,
    TooLate,
)
from indexer.errors import FleetFull
from indexer.publishing.founding import find_or_found
from indexer.publishing.sweeper import SweeperLease
from indexer.telemetry import Telemetry

DIRECTORY_RENEW_S: Final = DIRECTORY_TTL_S / 10

DIRECTORY_RETRY_S: Final = DIRECTORY_RENEW_S / 10

assert DIRECTORY_RENEW_S * 3 <= DIRECTORY_TTL_S, "two lost renewals would lose the fleet's listing"


class Loss(StrEnum):
    """How it showed that a slot is not this instance's any more.

    Attributes:
        LEASE: a heartbeat was refused: swept, flushed, or another took it.
        RECORD: a change of the record was refused, likewise.
        INDEX: a write to the index was refused: its partition was lost.
        SERVER: another server answers, whose copy may lack the last writes.
    """

    LEASE = "lease"
    RECORD = "record"
    INDEX = "index"
    SERVER = "server"


class Membership:
    """A slot, as long as it lasts.

    Attributes:
        slot: -1 before the first.
        generation: of the slot.
        lost: how the slot was lost; None while it is held.
    """

    def __init__(
        self,
        redis: Link,
        *,
        founding: FleetRecord,
        record: InstanceRecord,
        sweeper_lease: SweeperLease,
        telemetry: Telemetry,
        on_loss: Callable[[], None],
        state: Callable[[], SlotFlag],
    ) -> None:
        """Prepare a membership.

        Args:
            redis: link whose calls have a deadline.
            founding: record to found the fleet with, should there be none.
            record: what routers shall know about the instance.
            sweeper_lease: held while the fleet is founded.
            telemetry: metrics.
            on_loss: called when the slot turns out to be lost.
            state: with which a slot is taken, before any heartbeat: DRAINING or SlotFlag(0).
        """
        self.slot = SlotIndex(-1)
        self.generation = 0
        self.lost: Loss | None = None
        self._fleet: FleetRecord | None = None
        self._redis = redis
        self._founding = founding
        self._record = record
        self._sweeper_lease = sweeper_lease
        self._telemetry = telemetry
        self._on_loss = on_loss
        self._state = state
        self._rank = str(record.data_parallel_rank or 0)
        self._log = structlog.get_logger().bind(rank=self._rank, instance_id=record.instance_id)
        self._servers: dict[str, str | None] = {}  # who answered when we joined, by anchor key
        self._list_due_s = 0.0

    @property
    def fleet(self) -> FleetRecord:
        """The fleet as this instance last joined it."""
        assert self._fleet is not None, "not joined"
        return self._fleet

    @property
    def is_held(self) -> bool:
        """Whether there is a slot, as far as is known."""
        return self._fleet is not None and self.lost is None

    async def join(self) -> FleetRecord:
        """Take a slot, in place of the one had so far, which may still be ours or not.

        Raises:
            FleetFull: there is none.
        """
        fleet = await find_or_found(self._redis, self._founding, self._sweeper_lease)
        anchors = [index_functions.anchor(fleet, p) for p in range(fleet.partitions)]
        servers = {
            key: self._redis.server_of(key) for key in (keys.fleet(fleet.fleet_id), *anchors)
        }
        try:
            self.slot, self.generation = await self._take_slot(fleet)
        except FleetFull:
            self._telemetry.fleet_full.labels(self._rank).set(1)
            raise
        self._telemetry.fleet_full.labels(self._rank).set(0)
        del anchors[self.slot // SLOTS_PER_PARTITION_MAX]
        self._servers = {key: run_id for key, run_id in servers.items() if key not in anchors}
        self._fleet, self.lost = fleet, None
        await self._list()
        self._log.info(
            "slot_taken",
            fleet_id=fleet.fleet_id,
            model_scope=fleet.model_scope,
            slot=self.slot,
            generation=self.generation,
            epoch=fleet.epoch,
        )
        return fleet

    async def _take_slot(self, fleet: FleetRecord) -> tuple[SlotIndex, int]:
        former = None if self._fleet is None else (self.slot, self.generation)
        joining = fleet_functions.join(
            fleet.fleet_id, self._record.encode(), state=self._state(), former=former
        )
        reply = await functions.run(self._redis, joining)
        if not reply:
            raise FleetFull(
                f"all slots of fleet {fleet.model_scope!r} are taken or wait to be swept: found it "
                "with more --partitions"
            )
        slot, generation = SlotIndex(int(reply[0])), int(reply[1])
        opening = index_functions.open_slot(fleet, slot, generation)
        if not await functions.run(self._redis, opening):
            await functions.run(
                self._redis, fleet_functions.close(fleet.fleet_id, slot, generation, -1)
            )
            raise FleetFull(f"slot {slot} was left over from an earlier fleet")
        return slot, generation

    async def heartbeat(
        self,
        state: SlotFlag,
        index: IndexCounters,
        counters: EngineCounters | None,
        stored: Sequence[BlockHash],
        known_s: float | None,
    ) -> HeartbeatReply | TooLate | None:
        """Renew the lease and publish counters; None when there is no slot (any more).

        Args:
            state: DRAINING, SLEEPING or SlotFlag(0).
            index: this instance's part of the index.
            counters: its engine's; None when they are not known.
            stored: awaited blocks that its engine has stored.
            known_s: Redis time at which all this was true; None when that clock is not known.
        """
        if not self.is_held:
            return None
        beat = fleet_functions.heartbeat(
            self.fleet,
            self.slot,
            self.generation,
            state=state,
            index=index,
            counters=counters,
            stored=stored,
            known_s=known_s,
        )
        asked = self._place
        reply = fleet_functions.heartbeat_reply(await functions.run(self._redis, beat))
        if asked != self._place:  # taken meanwhile: the answer is about the former slot
            return None
        if reply is None:
            self.lose(Loss.LEASE)
            return None
        self.check_servers()
        if time.monotonic() >= self._list_due_s:
            await self._list()
        return reply

    async def announce(self, record: InstanceRecord) -> None:
        """Replace what routers know about the instance."""
        self._record = record
        if not self.is_held:
            return
        fleet_id = self.fleet.fleet_id
        call = fleet_functions.announce(fleet_id, self.slot, self.generation, record.encode())
        asked = self._place
        if not await functions.run(self._redis, call) and asked == self._place:
            self.lose(Loss.RECORD)

    @property
    def _place(self) -> tuple[int, SlotIndex, int]:
        """What tells one slot had from another; epochs begin the generations anew."""
        return self.fleet.epoch, self.slot, self.generation

    async def close(self) -> None:
        """Let nobody use the slot any more, whoever holds it by now under our generation."""
        call = fleet_functions.close(self.fleet.fleet_id, self.slot, self.generation, -1)
        await functions.run(self._redis, call)

    def check_servers(self) -> None:
        """Notice that another server answers for the fleet or its index than when we joined.

        Replication is asynchronous, so what a new master has may lack our last writes: even our
        slot, which it may then hand out a second time under the same generation.
        """
        for key, before in self._servers.items():
            now = self._redis.server_of(key)
            if before is None:
                self._servers[key] = now
            elif now not in (None, before) and self.is_held:
                self.lose(Loss.SERVER)

    def lose(self, loss: Loss) -> None:
        """The slot is not ours, or nobody knows whether it is."""
        if self.is_held:
            self.lost = loss
            self._log.warning(
                "slot_lost", slot=self.slot, generation=self.generation, cause=loss.value
            )
        self._on_loss()

    async def _list(self) -> None:
        """Keep the fleet in the directory, which may be on a server that is away by itself."""
        wait_s = DIRECTORY_RENEW_S
        try:
            await functions.run(self._redis, upkeep.list_fleet(self._founding.fleet_id))
        except REDIS_WEATHER as error:
            wait_s = DIRECTORY_RETRY_S
            self._telemetry.redis_failures.labels("list").inc()
            self._log.warning("fleet_not_listed", error=str(error))
        self._list_due_s = time.monotonic() + wait_s
