"""A fleet on the embedded server, as sidecars would leave it, for tests of what reads it."""

from collections.abc import Sequence
from typing import Any

import redis.asyncio
from builders import make_fleet_record, make_heartbeat, make_instance
from waiting import until as until  # noqa: PLC0414  # who uses a fleet waits for it

from indexer.contract import (
    block_hash,
    fleet_functions,
    functions,
    index_functions,
    keys,
    reservations,
)
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.records import EngineCounters, FleetCounters, FleetRecord


async def found_fleet(
    client: redis.asyncio.Redis, names: Sequence[str] = ("a", "b"), **changes: Any
) -> FleetRecord:
    """Found a fleet and let one instance per name join; slot i belongs to names[i]."""
    fleet = make_fleet_record(**changes)
    await functions.run(client, fleet_functions.create(fleet))
    for name in names:
        record = make_instance(name, models=[fleet.model_scope])
        slot, generation = await functions.run(
            client, fleet_functions.join(fleet.fleet_id, record.encode())
        )
        await functions.run(client, index_functions.open_slot(fleet, slot, generation))
    await client.sadd(keys.directory(), fleet.fleet_id)
    return fleet


def chain(fleet: FleetRecord, token_ids: Sequence[int]) -> list[BlockHash]:
    """Block hashes of a prompt of this fleet's model."""
    root = block_hash.root(model_scope=fleet.model_scope, block_size_tokens=fleet.block_size_tokens)
    packed = block_hash.pack_tokens(token_ids)
    return block_hash.split(block_hash.chain(root, packed, fleet.block_size_tokens))


async def store(
    client: redis.asyncio.Redis, fleet: FleetRecord, slot: int, hashes: Sequence[BlockHash]
) -> None:
    """Let the instance of a slot hold these blocks."""
    stored = await functions.run(client, index_functions.store(fleet, SlotIndex(slot), 1, hashes))
    assert stored == 1


async def report(
    client: redis.asyncio.Redis, fleet: FleetRecord, slot: int, running: int, waiting: int
) -> None:
    """Publish what an engine says of itself."""
    counters = EngineCounters(running_count=running, waiting_count=waiting, kv_usage_ratio=0.5)
    call = make_heartbeat(fleet, SlotIndex(slot), 1, counters=counters)
    assert await functions.run(client, call)


async def read(client: redis.asyncio.Redis, fleet: FleetRecord) -> FleetCounters:
    """The counters as they are."""
    counters = reservations.fleet_counters(
        await functions.run(client, reservations.read(fleet.fleet_id))
    )
    assert counters is not None
    return counters


async def reserved(client: redis.asyncio.Redis, fleet: FleetRecord) -> list[tuple[int, int]]:
    """(requests, prefill tokens) reserved on each slot."""
    slots = (await read(client, fleet)).slots
    columns = slots["reserved_requests"], slots["reserved_prefill_tokens"]
    return list(zip(*(column.tolist() for column in columns), strict=True))
