"""What is published, decoded for an operator: fleets, instances, routers, size of the index."""

import json
import sys
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from indexer.contract import functions, keys
from indexer.contract.functions import RedisClient
from indexer.contract.identifiers import FleetId, RouterId
from indexer.contract.records import FleetCounters, FleetRecord, InstanceRecord, slot_view

PIPE_COLUMNS: Final = 200

BUCKETS_SAMPLED: Final = 64
"""Buckets whose size is asked for; block hashes spread evenly, so a sample tells the whole."""


async def show(redis: Redis, *, as_json: bool) -> None:
    """Print every fleet that Redis knows."""
    try:
        fleets = await read_fleets(redis)
    finally:
        await redis.aclose()
    if as_json:
        print(json.dumps({"fleets": fleets}, indent=2))  # noqa: T201 - this is its output
    else:
        _print_tables(fleets)


async def read_fleets(redis: Redis) -> list[dict[str, Any]]:
    """All fleets as plain values."""
    fleets = []
    for fleet_id in await _fleet_ids(redis):
        fleet = await functions.read_fleet(redis, fleet_id)
        if fleet is None:
            fleets.append({"fleet_id": fleet_id, "gone": True})
            continue
        counters = await _counters(redis, fleet_id)
        fleets.append(
            {
                **asdict(fleet),
                "gone": False,
                "instances": await _instances(redis, fleet_id, counters),
                "routers": await _routers(redis, fleet_id),
                "index": await _index(redis, fleet),
            }
        )
    return fleets


async def _fleet_ids(redis: RedisClient) -> list[FleetId]:
    members = await redis.execute_command("SMEMBERS", keys.directory())
    return sorted(FleetId(member.decode()) for member in members)


async def _counters(redis: Redis, fleet: FleetId) -> FleetCounters | None:
    try:
        return functions.fleet_counters(await functions.run(redis, functions.read(fleet)))
    except ValueError:
        return None


async def _instances(
    redis: RedisClient, fleet: FleetId, counters: FleetCounters | None
) -> list[dict[str, Any]]:
    if counters is None:
        return []
    records = await redis.execute_command("HGETALL", keys.instances(fleet))
    instances = []
    for slot in np.flatnonzero(counters.slots["flags"]):
        try:
            record = asdict(InstanceRecord.decode(records[str(slot).encode()]))
        except (KeyError, TypeError, ValueError):
            record = {"instance_id": None}
        view = slot_view(counters.slots[slot], counters.now_s)
        instances.append({**record, "slot": int(slot), **view})
    return instances


async def _routers(redis: RedisClient, fleet: FleetId) -> list[dict[str, Any]]:
    seconds, microseconds = await redis.execute_command("TIME")
    now_s = seconds + microseconds / 1_000_000
    routers = []
    leases = await redis.execute_command("ZRANGE", keys.routers(fleet), 0, -1, "WITHSCORES")
    for raw, until_s in leases:
        router = raw.decode()
        ledger = keys.ledger(fleet, RouterId(router))
        routers.append(
            {
                "router_id": router,
                "lease_left_s": round(until_s - now_s, 3),
                "reservations": await redis.execute_command("HLEN", ledger),
            }
        )
    return routers


async def _index(redis: Redis, fleet: FleetRecord) -> dict[str, int]:
    """Size of the index, extrapolated from a sample of its buckets."""
    buckets = 1 << fleet.bucket_bits
    sampled = range(0, buckets, max(1, buckets // BUCKETS_SAMPLED))
    blocks = size_bytes = 0
    for partition in range(fleet.partitions):
        async with redis.pipeline(transaction=False) as pipeline:
            for bucket in sampled:
                key = keys.bucket(fleet.fleet_id, partition, bucket)
                pipeline.hlen(key)
                pipeline.memory_usage(key)
            replies = await pipeline.execute()
        blocks += sum(replies[::2])
        size_bytes += sum(reply or 0 for reply in replies[1::2])
    factor = buckets / len(sampled)
    return {
        "buckets": buckets * fleet.partitions,
        "blocks_estimate": round(blocks * factor),
        "bytes_estimate": round(size_bytes * factor),
    }


def _print_tables(fleets: list[dict[str, Any]]) -> None:
    console = _console()
    if not fleets:
        console.print("No fleet is published here.")
    for fleet in fleets:
        if fleet["gone"]:
            console.print(f"Fleet {fleet['fleet_id']}: expired.")
            continue
        index = fleet["index"]
        console.print(
            f"Fleet {fleet['model_scope']} ({fleet['fleet_id']}): blocks of "
            f"{fleet['block_size_tokens']} tokens, {fleet['partitions']} partitions, about "
            f"{index['blocks_estimate']:,} distinct blocks in {index['buckets']:,} buckets, "
            f"{index['bytes_estimate']:,} bytes; epoch {fleet['epoch']:016x}",
            highlight=False,
        )
        _print_rows("Instances", fleet["instances"], INSTANCE_COLUMNS)
        _print_rows("Routers", fleet["routers"], ROUTER_COLUMNS)


INSTANCE_COLUMNS: Final = (
    "slot",
    "generation",
    "instance_id",
    "url",
    "flags",
    "lease_left_s",
    "counters_age_s",
    "reserved_requests",
    "reserved_prefill_tokens",
    "foreign_requests",
    "running_count",
    "waiting_count",
    "kv_usage_ratio",
)
ROUTER_COLUMNS: Final = ("router_id", "lease_left_s", "reservations")


def _print_rows(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "))
    for row in rows:
        values = (row.get(column) for column in columns)
        table.add_row(*(", ".join(v) if isinstance(v, list) else str(v) for v in values))
    _console().print(table)


def _console() -> Console:
    """As wide as the terminal; in a pipe or file wide enough for every column."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)
