"""What is published, decoded for an operator: fleets, instances, routers, size of the index."""

import json
import sys
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from indexer.contract import fleet_functions, functions, keys, request_classes, reservations
from indexer.contract.fleet_functions import Unreadable, reading
from indexer.contract.identifiers import FleetId, RouterId
from indexer.contract.limits import BUCKETS_PER_MEASURE_MAX
from indexer.contract.link import Link
from indexer.contract.records import FleetCounters, FleetRecord, InstanceRecord, slot_view
from indexer.publishing.memory import POLICY_REMEDY, bytes_per_membership, index_bytes, measure

PIPE_COLUMNS: Final = 200


async def show(redis: Link, *, as_json: bool) -> None:
    """Print every fleet that Redis knows."""
    fleets = await read_fleets(redis)
    if as_json:
        print(json.dumps({"fleets": fleets}, indent=2, default=repr))  # noqa: T201 - this is its output
    else:
        _print_tables(fleets)


async def read_fleets(redis: Link) -> list[dict[str, Any]]:
    """All fleets as plain values."""
    fleets = []
    for member in sorted(await redis.execute_command("SMEMBERS", keys.directory())):
        try:
            with reading():
                fleets.append(await _read_fleet(redis, fleet_functions.fleet_id(member)))
        except Unreadable as error:
            shown = {"fleet_id": repr(member)[2:-1], "gone": False, "unreadable": str(error)}
            fleets.append(shown)
    return fleets


async def _read_fleet(redis: Link, fleet_id: FleetId) -> dict[str, Any]:
    fleet = await fleet_functions.read_fleet(redis, fleet_id)
    if fleet is None:
        return {"fleet_id": fleet_id, "gone": True}
    counters = await _counters(redis, fleet_id)
    return {
        **asdict(fleet),
        "gone": False,
        "instances": await _instances(redis, fleet_id, counters),
        "routers": await _routers(redis, fleet_id),
        "classes": await _classes(redis, fleet_id),
        "index": await _index(redis, fleet),
    }


async def _counters(redis: Link, fleet: FleetId) -> FleetCounters | None:
    return reservations.fleet_counters(await functions.run(redis, reservations.read(fleet)))


async def _instances(
    redis: Link, fleet: FleetId, counters: FleetCounters | None
) -> list[dict[str, Any]]:
    if counters is None:
        return []
    raw = await redis.execute_command("HGETALL", keys.instances(fleet))
    records = dict(zip(raw[::2], raw[1::2], strict=True))
    instances = []
    for slot in np.flatnonzero(counters.slots["flags"]):
        try:
            record = asdict(InstanceRecord.decode(records[str(slot).encode()]))
        except (KeyError, TypeError, ValueError):
            record = {"instance_id": None}
        view = slot_view(counters.slots[slot], counters.now_s)
        instances.append({**record, "slot": int(slot), **view})
    return instances


async def _routers(redis: Link, fleet: FleetId) -> list[dict[str, Any]]:
    seconds, microseconds, *_ = await functions.run(redis, reservations.read(fleet))
    now_s = int(seconds) + int(microseconds) / 1_000_000
    routers = []
    leases = await redis.execute_command("ZRANGE", keys.routers(fleet), 0, -1, "WITHSCORES")
    for raw, until_s in zip(leases[::2], leases[1::2], strict=True):
        router = raw.decode()
        ledger = keys.ledger(fleet, RouterId(router))
        routers.append(
            {
                "router_id": router,
                "lease_left_s": round(float(until_s) - now_s, 3),
                "reservations": await redis.execute_command("HLEN", ledger),
            }
        )
    return routers


async def _classes(redis: Link, fleet: FleetId) -> dict[str, Any]:
    """What routers with detect_hot_prefixes have counted; nothing where none has."""
    reply = await functions.run(redis, request_classes.classes(fleet))
    requests, states = request_classes.class_states(reply)
    return {"requests": round(requests, 1), "hot": [asdict(state) for state in states]}


async def _index(redis: Link, fleet: FleetRecord) -> dict[str, Any]:
    """Size of the index, extrapolated from a sample of its buckets; and what bounds it."""
    samples = await measure(redis, fleet, buckets_max=BUCKETS_PER_MEASURE_MAX)
    size_bytes = [round(index_bytes(fleet, sample)) for sample in samples]
    factor = (1 << fleet.bucket_bits) * fleet.partitions / sum(s.buckets for s in samples)
    servers = {sample.server for sample in samples if sample.server is not None}
    budgets = await redis.execute_command("HLEN", keys.budgets(fleet.fleet_id))
    return {
        "buckets": (1 << fleet.bucket_bits) * fleet.partitions,
        "blocks_estimate": round(sum(sample.blocks for sample in samples) * factor),
        "memberships_estimate": round(sum(sample.memberships for sample in samples) * factor),
        "bytes_estimate": sum(size_bytes),
        "bytes_estimate_by_partition": size_bytes,
        "bytes_per_membership": bytes_per_membership(samples),
        "budgets": int(budgets),
        "redis_evicts": any(server.evicts for server in servers),
    }


def _print_tables(fleets: list[dict[str, Any]]) -> None:
    console = _console()
    if not fleets:
        console.print("No fleet is published here.")
    for fleet in fleets:
        if fleet["gone"]:
            console.print(f"Fleet {fleet['fleet_id']}: expired.")
            continue
        if "unreadable" in fleet:
            reason = f"Fleet {fleet['fleet_id']}: unreadable: {fleet['unreadable']}"
            console.print(reason, highlight=False, markup=False)
            continue
        index = fleet["index"]
        console.print(
            f"Fleet {fleet['model_scope']} ({fleet['fleet_id']}): blocks of "
            f"{fleet['block_size_tokens']} tokens, {fleet['partitions']} partitions, about "
            f"{index['blocks_estimate']:,} distinct blocks in {index['buckets']:,} buckets, "
            f"{index['bytes_estimate']:,} bytes, {index['bytes_per_membership'] or 0:.1f} for one "
            f"block of one instance, {index['budgets']} budgets; epoch {fleet['epoch']:016x}",
            highlight=False,
        )
        if index["redis_evicts"]:
            console.print(f"Redis may evict: {POLICY_REMEDY}.", highlight=False)
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
    "index_blocks",
    "completeness_ratio",
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
