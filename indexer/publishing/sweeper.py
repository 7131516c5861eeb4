"""What one sidecar of a fleet does at a time: keep and bound it, sweep slots, reap routers.

A lease in Redis chooses the one. It is renewed before every few pages of a sweep; a sweep that
comes too late finds the slot with another generation and does nothing.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import structlog

from indexer.contract import (
    audit,
    fleet_functions,
    functions,
    index_functions,
    keys,
    reservations,
    upkeep,
)
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId, SlotIndex
from indexer.contract.limits import (
    INDEX_RENEW_S,
    INSTANCE_GRACE_S,
    INSTANCE_LEASE_TTL_S,
    KEEP_BUCKETS_PER_CALL_MAX,
    SWEEP_BUCKETS_PER_CALL_MAX,
)
from indexer.contract.link import Link
from indexer.contract.records import FleetCounters, FleetRecord, SlotFlag
from indexer.publishing.memory import MemoryKeeper
from indexer.telemetry import Telemetry

SWEEPER_LEASE_TTL_S: Final = 10.0
"""Far above one page of a sweep, so that a holder that still works has not lost it."""

ROUND_S: Final = 1.0
REAPS_PER_ROUND_MAX: Final = 16
BALANCE_EVERY_S: Final = 10.0
"""Between two audits; a difference stays so long, and the sweeper's lease if that has died."""

CALLS_PER_ROUND_TRIP: Final = 16
"""Sweep or keep calls between two renewals of the lease; other commands run between them."""


class SweeperLease:
    """The lease of one fleet's sweeper, as this process has or wants it.

    Attributes:
        founders: of this process, that found the fleet under it or wait to.
    """

    def __init__(self, redis: Link, fleet: FleetId) -> None:
        self._redis = redis
        self._fleet = fleet
        self._token = secrets.token_hex(8).encode()
        self.founders = 0

    async def hold(self) -> bool:
        """Take or renew the lease; False while another process has it."""
        call = upkeep.lease(self._fleet, self._token, SWEEPER_LEASE_TTL_S)
        return bool(await functions.run(self._redis, call))

    async def release(self) -> None:
        """Let another process have it at once."""
        await functions.run(self._redis, upkeep.lease(self._fleet, self._token, 0.0))


class Sweeper:
    """Frees the slots of dead instances, takes back what dead routers reserved, bounds memory.

    It also puts off the expiry of the index, which ends when nobody of the fleet is left to do so.

    Args:
        redis: link whose calls have a deadline.
        lease: of the fleet's sweeper.
        memory: measures and divides.
        telemetry: metrics.
    """

    def __init__(
        self, redis: Link, lease: SweeperLease, memory: MemoryKeeper, telemetry: Telemetry
    ) -> None:
        self._memory = memory
        self._redis = redis
        self._lease = lease
        self._telemetry = telemetry
        self._log = structlog.get_logger()
        self._kept_epoch: int | None = None
        self._kept_s = -math.inf
        self._balanced_s = -math.inf
        self._round_s = -math.inf
        self._unbroken_since_s = math.inf

    async def run(self, current: Callable[[], FleetRecord]) -> None:
        """Work once a second while this process has the lease; Redis may be away.

        Args:
            current: the fleet as it is now; it may be founded anew.
        """
        has_checked = False
        while True:
            try:
                if not has_checked:
                    await self._memory.check_servers(current())
                    has_checked = True
                await self.round(current())
            except (*REDIS_WEATHER, ValueError) as error:
                self._telemetry.redis_failures.labels("sweep").inc()
                self._log.warning("sweep_failed", error=str(error))
            await asyncio.sleep(ROUND_S)

    async def round(self, fleet: FleetRecord) -> None:
        """Keep and bound the index, reap dead routers, sweep dead slots: with the lease only."""
        if not await self._lease.hold():
            self._memory.rest()
            return
        if await self._is_in_the_way(fleet.fleet_id):
            self._memory.rest()
            await self._lease.release()
            return
        await self._keep(fleet)
        for _ in range(REAPS_PER_ROUND_MAX):
            reply = await functions.run(self._redis, reservations.reap(fleet.fleet_id))
            if not reply:
                break
            self._telemetry.reaped.inc(int(reply[1]))
            self._log.warning(
                "router_reaped", router_id=reply[0].decode(), reservations=int(reply[1])
            )
        await self._balance(fleet.fleet_id)
        reply = await functions.run(self._redis, reservations.read(fleet.fleet_id))
        counters = reservations.fleet_counters(reply)
        if counters is None:
            return
        await self._memory.round(fleet, counters)
        if self._has_watched():
            for slot, generation in _dead_slots(counters):
                await self._retire(fleet, slot, generation)

    async def _is_in_the_way(self, fleet: FleetId) -> bool:
        """Whether the fleet has to be founded again, by others: this process's engines are away.

        Founding takes the lease, and they may never come back.
        """
        is_there = await self._redis.execute_command("EXISTS", keys.fleet(fleet))
        return not is_there and not self._lease.founders

    async def _balance(self, fleet: FleetId) -> None:
        """Set right, when it is time, what an audit finds: a key was deleted by hand."""
        started_s = time.monotonic()
        if started_s - self._balanced_s < BALANCE_EVERY_S:
            return
        books = audit.audited(await functions.run(self._redis, audit.audit(fleet)))
        if not books.looked:
            self._telemetry.audits_left_out.inc()
        if books.differences:
            slots, forgotten = await functions.run(self._redis, audit.balance(fleet))
            self._telemetry.balanced_slots.inc(slots)
            self._log.error("books_balanced", slots=slots, awaited_forgotten=forgotten)
        self._balanced_s = started_s

    def _has_watched(self) -> bool:
        """Whether Redis has answered round after round for a lease's length.

        After an outage every lease looks long dead until its sidecar has come to renew it.
        """
        now_s = time.monotonic()
        if now_s - self._round_s > INSTANCE_LEASE_TTL_S:
            self._unbroken_since_s = now_s
        self._round_s = now_s
        return now_s - self._unbroken_since_s >= INSTANCE_LEASE_TTL_S

    async def _keep(self, fleet: FleetRecord) -> None:
        """Put off the expiry of every key of the index, when it is time."""
        started_s = time.monotonic()
        if self._kept_epoch == fleet.epoch and started_s - self._kept_s < INDEX_RENEW_S:
            return
        buckets = 1 << fleet.bucket_bits
        per_call = min(KEEP_BUCKETS_PER_CALL_MAX, buckets)
        pages = [(p, b) for p in range(fleet.partitions) for b in range(0, buckets, per_call)]
        for i in range(0, len(pages), CALLS_PER_ROUND_TRIP):
            if not await self._lease.hold():
                return
            calls = [
                index_functions.keep(fleet, partition, first, per_call)
                for partition, first in pages[i : i + CALLS_PER_ROUND_TRIP]
            ]
            await functions.run_all(self._redis, calls)
        self._kept_epoch, self._kept_s = fleet.epoch, started_s

    async def _retire(self, fleet: FleetRecord, slot: SlotIndex, generation: int) -> None:
        """Close a slot whose lease has been dead long enough, sweep it, free it.

        Does as much of it as it may: without the lease the slot stays closed for whoever has it.
        """
        closing = fleet_functions.close(fleet.fleet_id, slot, generation, INSTANCE_GRACE_S)
        if not await functions.run(self._redis, closing):
            return
        if not await self._sweep(fleet, slot, generation):
            return
        if await functions.run(self._redis, fleet_functions.free(fleet.fleet_id, slot, generation)):
            self._telemetry.sweeps.inc()
            self._log.info("slot_freed", slot=slot, generation=generation)

    async def _sweep(self, fleet: FleetRecord, slot: SlotIndex, generation: int) -> bool:
        """Take a closed slot out of every bucket; False when lease or slot was lost on the way."""
        buckets = 1 << fleet.bucket_bits
        per_call = min(SWEEP_BUCKETS_PER_CALL_MAX, buckets)
        per_round_trip = per_call * CALLS_PER_ROUND_TRIP
        for start in range(0, buckets, per_round_trip):
            if not await self._lease.hold():
                return False
            calls = [
                index_functions.sweep(fleet, slot, generation, first, per_call)
                for first in range(start, min(start + per_round_trip, buckets), per_call)
            ]
            if min(await functions.run_all(self._redis, calls)) < 0:
                return False
        return True


def _dead_slots(counters: FleetCounters) -> list[tuple[SlotIndex, int]]:
    """Slots to be swept, with their generations."""
    slots = counters.slots
    closing = (slots["flags"] & SlotFlag.CLOSING) != 0
    dead = (slots["flags"] != 0) & (slots["lease_until_s"] + INSTANCE_GRACE_S < counters.now_s)
    found_slots = np.flatnonzero(closing | dead)
    return [(SlotIndex(int(i)), int(slots["generation"][i])) for i in found_slots]
