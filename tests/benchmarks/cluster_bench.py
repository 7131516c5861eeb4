"""One server against a cluster of three shards, in one run: same answers, evenness, round trips.

    python tests/benchmarks/cluster_bench.py [--quick] [--output build/bench/cluster.json]

A fleet of 64 instances in 4 or 12 partitions is filled through the link that routers and sidecars
use, then every prompt is looked up in all partitions at once. Three shards, their replicas and the
client share the machine's cores, so round trips are those of a crowded machine.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from redis_servers import RedisCluster, RedisServer, redis_cluster, redis_server
from waiting import until

from indexer.contract import block_hash, functions, index_functions, keys
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import BLOCKS_PER_WRITE_MAX, SLOTS_PER_PARTITION_MAX
from indexer.contract.link import Link, connected
from indexer.contract.records import FleetRecord

INSTANCES = 64
PROMPT_BLOCKS = 512
CALLS_PER_WRITE = 64
SEED = 20261130

Prompts = list[tuple[SlotIndex, list[BlockHash]]]


def shape(partitions: int) -> FleetRecord:
    """A fleet of so many partitions."""
    return FleetRecord(
        fleet_id=keys.fleet_id("cluster"),
        model_scope="cluster",
        block_size_tokens=16,
        partitions=partitions,
        bucket_bits=10,
        epoch=1,
    )


def prompts_of(fleet: FleetRecord, count: int) -> Prompts:
    """Chains, each on one instance; instances are spread evenly over the partitions."""
    rng = np.random.default_rng(SEED)
    per = -(-INSTANCES // fleet.partitions)
    slots = [
        SlotIndex(i % fleet.partitions * SLOTS_PER_PARTITION_MAX + i // fleet.partitions % per)
        for i in range(count)
    ]
    return [(slot, block_hash.split(rng.bytes(8 * PROMPT_BLOCKS))) for slot in slots]


async def fill(link: Link, fleet: FleetRecord, prompts: Prompts) -> float:
    """Store every prompt; returns blocks a second."""
    opened = {slot for slot, _ in prompts}
    await functions.run_all(link, [index_functions.open_slot(fleet, slot, 1) for slot in opened])
    calls = [
        index_functions.store(fleet, slot, 1, chain[i : i + BLOCKS_PER_WRITE_MAX])
        for slot, chain in prompts
        for i in range(0, len(chain), BLOCKS_PER_WRITE_MAX)
    ]
    started_s = time.perf_counter()
    for i in range(0, len(calls), CALLS_PER_WRITE):
        await functions.run_all(link, calls[i : i + CALLS_PER_WRITE])
    return len(prompts) * PROMPT_BLOCKS / (time.perf_counter() - started_s)


async def look(link: Link, fleet: FleetRecord, prompts: Prompts) -> tuple[list[Any], float]:
    """Depths of every prompt by slot, and the median round trip over all partitions in ms."""
    depths, took_ms = [], []
    for _, chain in prompts:
        hashes = b"".join(chain)
        calls = [index_functions.lookup(fleet, p, hashes) for p in range(fleet.partitions)]
        started_s = time.perf_counter()
        replies = await functions.run_all(link, calls)
        took_ms.append((time.perf_counter() - started_s) * 1e3)
        out = np.zeros((fleet.partitions, SLOTS_PER_PARTITION_MAX), np.int64)
        for p, reply in enumerate(replies):
            index_functions.depths(reply, out[p])
        depths.append(out.tolist())
    return depths, statistics.median(took_ms)


async def stored_keys(cluster: RedisCluster, fleet: FleetRecord) -> tuple[list[int], int]:
    """Blocks by master, and errors that told of a wrong slot."""
    blocks, misdirected = [], 0
    for master in await cluster.masters():
        count = 0
        async with master.client() as client:
            async for key in client.scan_iter(match=f"{keys.PREFIX}{{{fleet.fleet_id}:*:*"):
                count += await client.hlen(key)
            errors = await client.info("errorstats")
        blocks.append(count)
        misdirected += sum(
            int(errors.get(f"errorstat_{name}", {"count": 0})["count"])
            for name in ("MOVED", "CROSSSLOT", "ASK")
        )
    return blocks, misdirected


async def on_one(server: RedisServer, fleet: FleetRecord, prompts: Prompts) -> tuple[Any, ...]:
    """Store rate, answers and round trip of one server."""
    await until(server.answers, "the server answers")
    async with connected(server.url) as link:
        return (await fill(link, fleet, prompts), *await look(link, fleet, prompts))


async def on_cluster(
    cluster: RedisCluster, fleet: FleetRecord, prompts: Prompts
) -> tuple[Any, ...]:
    """The same of a cluster, the round trip to replicas, and where the blocks are."""
    await cluster.heal()
    async with connected(cluster.url) as link:
        rate = await fill(link, fleet, prompts)
        depths, ms = await look(link, fleet, prompts)
    async with connected(cluster.url, read_replicas=True) as link:
        _, replicas_ms = await look(link, fleet, prompts)
    return (rate, depths, ms, replicas_ms, *await stored_keys(cluster, fleet))


def compare(folder: Path, partitions: int, count: int) -> dict[str, Any]:
    """The same fleet on both."""
    fleet = shape(partitions)
    prompts = prompts_of(fleet, count)
    with redis_server(folder / f"one{partitions}") as server:
        one_rate, one_depths, one_ms = uvloop.run(on_one(server, fleet, prompts))
    shards = folder / f"shards{partitions}"
    shards.mkdir()
    with redis_cluster(shards) as cluster:
        rate, depths, ms, replicas_ms, blocks, misdirected = uvloop.run(
            on_cluster(cluster, fleet, prompts)
        )
    return {
        "partitions": partitions,
        "shards": len(blocks),
        "same_answers": depths == one_depths,
        "blocks_by_shard": blocks,
        "busiest_shard_above_mean_ratio": round(max(blocks) * len(blocks) / sum(blocks) - 1, 3),
        "misdirected_calls": misdirected,
        "lookup_round_trip_ms": {
            "one_server": round(one_ms, 3),
            "cluster": round(ms, 3),
            "replicas": round(replicas_ms, 3),
        },
        "lookup_ratio_cluster_to_one": round(ms / one_ms, 2),
        "store_ratio_cluster_to_one": round(rate / one_rate, 2),
    }


def run(*, quick: bool) -> list[dict[str, Any]]:
    """All figures."""
    count = 96 if quick else 960
    with tempfile.TemporaryDirectory() as folder:
        return [compare(Path(folder), partitions, count) for partitions in (4, 12)]


def main() -> None:
    """Run and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, against rot")
    parser.add_argument("--output", type=Path, default=Path("build/bench/cluster.json"))
    args = parser.parse_args()
    figures = run(quick=args.quick)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
