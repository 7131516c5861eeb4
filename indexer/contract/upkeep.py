"""Builders of the functions that keep a fleet in order (`upkeep_v1.lua`), and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from indexer.contract import index_functions, keys
from indexer.contract.call import Call
from indexer.contract.identifiers import FleetId, SlotIndex
from indexer.contract.limits import (
    BLOCKS_PER_MEASURE_MAX,
    BUCKETS_PER_MEASURE_MAX,
    BUDGETS_TTL_S,
    DIRECTORY_TTL_S,
)
from indexer.contract.records import FleetRecord

NEVER_EVICTS: Final = "noeviction"
SERVER_FIELDS: Final = (
    "run_id",
    "used_memory",
    "mem_not_counted_for_evict",
    "maxmemory",
    "maxmemory_policy",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """What a Redis server says of its memory."""

    run_id: str
    used_bytes: int  # as it counts towards the limit
    limit_bytes: int  # maxmemory; 0 = none
    policy: str  # what it does at the limit

    @property
    def evicts(self) -> bool:
        """Whether it drops keys by itself when it is full."""
        return self.limit_bytes > 0 and self.policy != NEVER_EVICTS


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Some buckets of one partition, and their server."""

    buckets: int
    bytes: int
    blocks: int  # distinct
    memberships: int  # (block, instance) pairs
    server: ServerMemory | None  # None where the server does not tell this client


def list_fleet(fleet: FleetId) -> Call:
    """Keep a fleet in the directory."""
    return Call("ts1_list", (keys.directory(),), (fleet, DIRECTORY_TTL_S))


def lease(fleet: FleetId, token: bytes, ttl_s: float) -> Call:
    """Take or renew the sweeper's lease; ttl_s 0 gives it up."""
    return Call("ts1_lease", (keys.sweeper(fleet),), (token, int(ttl_s * 1000)))


def budgets(fleet: FleetId, blocks: Mapping[tuple[SlotIndex, int], int]) -> Call:
    """Tell every sidecar how much it may publish.

    Args:
        fleet: the fleet.
        blocks: (slot, generation) -> canonical blocks; who is not in it is not limited.
    """
    args: list[str | int] = [BUDGETS_TTL_S]
    for (slot, generation), blocks_max in blocks.items():
        args += [slot, f"{generation} {blocks_max}"]
    return Call("ts1_budgets", (keys.budgets(fleet),), tuple(args))


def measure(fleet: FleetRecord, partition: int, buckets: Sequence[int]) -> Call:
    """Sample some buckets of a partition (none: only its server); see `memory_sample`."""
    assert len(buckets) <= BUCKETS_PER_MEASURE_MAX, len(buckets)
    numbers = np.array(buckets, "<u4").tobytes()
    anchor = index_functions.anchor(fleet, partition)
    return Call("ts1_measure", (anchor,), (numbers, BLOCKS_PER_MEASURE_MAX), read_only=True)


def memory_sample(reply: Sequence[Any]) -> MemorySample:
    """Decode what `measure` returned."""
    buckets, size_bytes, blocks, memberships, info = reply
    return MemorySample(
        buckets=int(buckets),
        bytes=int(size_bytes),
        blocks=int(blocks),
        memberships=int(memberships),
        server=_server_memory(info.decode(errors="replace")),
    )


def _server_memory(info: str) -> ServerMemory | None:
    pairs = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    try:
        run_id, used, uncounted, limit, policy = (pairs[name] for name in SERVER_FIELDS)
        return ServerMemory(
            run_id=run_id,
            used_bytes=int(used) - int(uncounted),
            limit_bytes=int(limit),
            policy=policy,
        )
    except (KeyError, ValueError):
        return None
