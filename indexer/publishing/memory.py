"""Measures what the index takes in Redis and keeps it within its limits, for the sweeper.

Every so often a few buckets of each partition are measured, which tells the bytes of one (block,
instance); how many of those there are the counters tell at any time. Where there is a limit
(`index_bytes_max`, or the server's own maxmemory), every instance gets a budget, all together no
more than fit into KEPT_RATIO of it, renewed each round. So the index exceeds that by no more than
what instances without a budget (new ones) publish until their first heartbeat after the next round,
and by the error of the sample.
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import structlog

from indexer.contract import functions, upkeep
from indexer.contract.functions import BatchClient
from indexer.contract.identifiers import SlotIndex
from indexer.contract.limits import BUCKETS_PER_MEASURE_MAX, SLOTS_PER_PARTITION_MAX
from indexer.contract.records import FleetCounters, FleetRecord, SlotFlag
from indexer.contract.upkeep import MemorySample, ServerMemory
from indexer.publishing import budget
from indexer.publishing.budget import Claim
from indexer.telemetry import Telemetry

MEASURE_S: Final = 10.0
CHANGED_RATIO: Final = 1 / 8
"""A change of the published blocks by this much is worth a new measurement at once."""

POLICY_REMEDY: Final = (
    "set `maxmemory-policy noeviction` on this Redis: it may drop keys of the index or the "
    "counters by itself, unseen by anybody; then prefixes are credited that no engine holds, and "
    "requests are counted that have long ended"
)


async def measure(
    redis: BatchClient, fleet: FleetRecord, *, buckets_max: int, turn: int = 0
) -> list[MemorySample]:
    """Measure a sample of every partition's buckets, in one round trip.

    Args:
        redis: where the fleet is.
        fleet: the fleet.
        buckets_max: of one partition; 0 asks only for the servers.
        turn: another one takes other buckets; block hashes spread evenly, so any will do.
    """
    buckets = 1 << fleet.bucket_bits
    step = max(1, buckets // buckets_max) if buckets_max else 0
    sampled = range(turn % step, buckets, step)[:buckets_max] if step else range(0)
    calls = [upkeep.measure(fleet, p, sampled) for p in range(fleet.partitions)]
    replies = await functions.run_all(redis, calls)
    return [upkeep.memory_sample(reply) for reply in replies]


def index_bytes(fleet: FleetRecord, sample: MemorySample) -> float:
    """What a partition takes, by its sample."""
    return sample.bytes * (1 << fleet.bucket_bits) / sample.buckets if sample.buckets else 0.0


def bytes_per_membership(samples: list[MemorySample]) -> float | None:
    """What one (block, instance) takes; None while there are none in the sample."""
    memberships = sum(sample.memberships for sample in samples)
    return sum(sample.bytes for sample in samples) / memberships if memberships else None


class MemoryKeeper:
    """Measures, divides and tells, round by round; for whoever has the sweeper's lease."""

    def __init__(
        self, redis: BatchClient, telemetry: Telemetry, *, index_bytes_max: int | None
    ) -> None:
        """Prepare.

        Args:
            redis: link whose calls have a deadline.
            telemetry: metrics.
            index_bytes_max: limit of the fleet's index, all partitions together; None for none.
        """
        self._redis = redis
        self._telemetry = telemetry
        self._index_bytes_max = index_bytes_max
        self._log = structlog.get_logger()
        self._samples: list[MemorySample] = []
        self._epoch: int | None = None
        self._measured_s = -math.inf
        self._measured_blocks = 0
        self._turn = 0
        self._budgets: dict[tuple[SlotIndex, int], int] = {}
        self._limited_count = 0
        self._warned: set[str] = set()

    async def check_servers(self, fleet: FleetRecord) -> None:
        """Warn of servers that may drop keys by themselves."""
        self._warn(await measure(self._redis, fleet, buckets_max=0))

    async def round(self, fleet: FleetRecord, counters: FleetCounters) -> None:
        """Measure when it is time, and tell every instance its budget where there is a limit."""
        used = np.flatnonzero(counters.slots["flags"])
        blocks = sum(self._published(counters, int(slot)) for slot in used)
        if self._is_due(fleet, blocks, counters.now_s):
            self._samples = await measure(
                self._redis, fleet, buckets_max=BUCKETS_PER_MEASURE_MAX, turn=self._turn
            )
            self._turn += 1
            self._epoch, self._measured_s = fleet.epoch, counters.now_s
            self._measured_blocks = blocks
            self._warn(self._samples)
            self._export(fleet)
        budgets = self._divide(fleet, counters)
        if budgets is None and not self._budgets:
            return
        await functions.run(self._redis, upkeep.budgets(fleet.fleet_id, budgets or {}))
        self._note(budgets or {}, counters)

    def rest(self) -> None:
        """Another sidecar has the lease: this one's figures are not the fleet's any more."""
        if self._samples:
            self._samples, self._budgets, self._limited_count = [], {}, 0
            self._telemetry.index_bytes.clear()
            self._telemetry.index_bytes_per_membership.set(0)

    def _is_due(self, fleet: FleetRecord, blocks: int, now_s: float) -> bool:
        if self._epoch != fleet.epoch or not 0 <= now_s - self._measured_s < MEASURE_S:
            return True
        return abs(blocks - self._measured_blocks) > self._measured_blocks * CHANGED_RATIO

    # -- division ---------------------------------------------------------------------------------

    def _divide(
        self, fleet: FleetRecord, counters: FleetCounters
    ) -> dict[tuple[SlotIndex, int], int] | None:
        """Blocks by (slot, generation); None where nothing has a limit."""
        divisions = []
        if self._index_bytes_max is not None:
            everything = range(fleet.partitions)
            divisions.append(self._division(counters, everything, self._index_bytes_max))
        for server, partitions in self._servers().items():
            held = sum(index_bytes(fleet, self._samples[p]) for p in partitions)
            limit_bytes = budget.server_limit_bytes(
                index_bytes=held,
                used_bytes=server.used_bytes,
                maxmemory_bytes=server.limit_bytes,
            )
            divisions.append(self._division(counters, partitions, limit_bytes))
        if not divisions:
            return None
        generation = counters.slots["generation"]
        return {(s, int(generation[s])): blocks for s, blocks in budget.least(*divisions).items()}

    def _servers(self) -> Mapping[ServerMemory, list[int]]:
        """Partitions by server, of servers that have a limit of their own."""
        last: dict[str, ServerMemory] = {}
        partitions: dict[str, list[int]] = {}
        for partition, sample in enumerate(self._samples):
            if sample.server is not None and sample.server.limit_bytes:
                last[sample.server.run_id] = sample.server
                partitions.setdefault(sample.server.run_id, []).append(partition)
        return {last[run_id]: found for run_id, found in partitions.items()}

    def _division(
        self, counters: FleetCounters, partitions: range | list[int], limit_bytes: float
    ) -> dict[SlotIndex, int]:
        """Divide a limit among the living instances of some partitions."""
        slots = counters.slots
        ours = np.isin(np.arange(len(slots)) // SLOTS_PER_PARTITION_MAX, list(partitions))
        used = ours & (slots["flags"] != 0)
        closing = (slots["flags"] & SlotFlag.CLOSING) != 0
        dead = used & (closing | (slots["lease_until_s"] < counters.now_s))
        claims = [self._claim(counters, int(i)) for i in np.flatnonzero(used & ~dead)]
        per_membership = bytes_per_membership([self._samples[p] for p in partitions])
        blocks_max = budget.blocks_within(limit_bytes, per_membership)
        # Who is dead will not follow a budget any more; its blocks stay until they are swept.
        left = sum(self._published(counters, int(i)) for i in np.flatnonzero(dead))
        return budget.divide(claims, blocks_max - left)

    def _published(self, counters: FleetCounters, slot: int) -> int:
        """Blocks an instance publishes: what it wants to, or the budget it was last given."""
        row = counters.slots[slot]
        wanted = int(row["index_blocks"])
        return min(wanted, self._budgets.get((SlotIndex(slot), int(row["generation"])), wanted))

    def _claim(self, counters: FleetCounters, slot: int) -> Claim:
        row = counters.slots[slot]
        reserved_s = int(row["last_reserved_s"])
        return Claim(
            slot=SlotIndex(slot),
            blocks=int(row["index_blocks"]),
            idle_s=max(0.0, counters.now_s - reserved_s) if reserved_s else math.inf,
        )

    # -- what an operator sees --------------------------------------------------------------------

    def _export(self, fleet: FleetRecord) -> None:
        for partition, sample in enumerate(self._samples):
            size_bytes = round(index_bytes(fleet, sample))
            self._telemetry.index_bytes.labels(str(partition)).set(size_bytes)
        self._telemetry.index_bytes_per_membership.set(bytes_per_membership(self._samples) or 0)

    def _note(self, budgets: dict[tuple[SlotIndex, int], int], counters: FleetCounters) -> None:
        """Remember the budgets; say so when other instances than before are cut short."""
        blocks = counters.slots["index_blocks"]
        limited_count = sum(most < int(blocks[slot]) for (slot, _), most in budgets.items())
        if (limited_count > 0) != (self._limited_count > 0):
            self._log.warning(
                "index_limited" if limited_count else "index_not_limited",
                instances=limited_count,
                blocks=sum(int(blocks[slot]) for slot, _ in budgets),
                blocks_max=sum(budgets.values()),
            )
        self._budgets, self._limited_count = budgets, limited_count

    def _warn(self, samples: list[MemorySample]) -> None:
        servers = {s.server.run_id: s.server for s in samples if s.server is not None}
        evicting = {run_id for run_id, server in servers.items() if server.evicts}
        self._telemetry.redis_evicts.set(len(evicting))
        for run_id in evicting - self._warned:
            self._log.warning(
                "redis_may_evict", policy=servers[run_id].policy, remedy=POLICY_REMEDY
            )
        self._warned = evicting
