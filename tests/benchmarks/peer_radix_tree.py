"""The peer's half of peer_bench.py: `dynamo._core.RadixTree`, measured by its own interpreter.

    .venv-peers/bin/python tests/benchmarks/peer_radix_tree.py BLOCKS REPEATS

Prints one JSON document. Layout as in index_bench.py: 64 workers, prompts of 60 to 500 blocks that
share 40. Events are JSON, as its Python interface wants them, and made before the clock starts; a
store is complete when `apply_event` returns.
"""

import json
import resource
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from dynamo._core import RadixTree

WORKERS = 64
SHARED_BLOCKS = 40
LENGTHS = (64, 512, 2048)
SEED = 20261129
HASH_MAX = 1 << 62


def event(number: int, parent: int | None, hashes: list[int]) -> bytes:
    """A store of blocks behind a parent; engine's and content's hashes may be the same here."""
    blocks = [{"block_hash": one, "tokens_hash": one} for one in hashes]
    stored = {"parent_hash": parent, "blocks": blocks}
    return json.dumps({"event_id": number, "data": {"stored": stored}, "dp_rank": 0}).encode()


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123 - one line
        return int(statm.read().split()[1]) * resource.getpagesize()


def store(rng: np.random.Generator, blocks: int) -> dict[str, Any]:
    """Blocks stored a second, and bytes of the process per (block, worker)."""
    shared = rng.integers(1, HASH_MAX, SHARED_BLOCKS).tolist()
    events, seen, made, memberships = [], set(), 0, 0
    while made < blocks:
        own = int(rng.integers(20, 461))
        worker = len(events) % WORKERS
        hashes = [*shared, *rng.integers(1, HASH_MAX, own).tolist()]
        events.append((worker, event(len(events), None, hashes)))
        made += len(hashes)
        memberships += own + (0 if worker in seen else SHARED_BLOCKS)
        seen.add(worker)
    tree = RadixTree()
    before = resident_bytes()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    for worker, raw in events:
        tree.apply_event(worker, raw)
    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return {
        "blocks_per_second": round(made / took_s),
        "blocks_per_cpu_second": round(made / cpu_s),
        "bytes_per_membership": round((resident_bytes() - before) / memberships, 1),
    }


def lookups(rng: np.random.Generator, length: int, repeats: int) -> dict[str, float]:
    """Median of a lookup of a chain that 64 workers hold to six different depths."""
    tree = RadixTree()
    chain = rng.integers(1, HASH_MAX, length).tolist()
    cuts = [*sorted(int(x) for x in rng.integers(1, length, 5)), length]
    for worker in range(WORKERS):
        tree.apply_event(worker, event(0, None, chain[: cuts[worker % len(cuts)]]))
    found, read = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        scores = tree.find_matches(chain)
        found.append(time.perf_counter() - start)
        assert len(scores.scores) == WORKERS
        read.append(time.perf_counter() - start)
    return {
        "find_matches_us": round(statistics.median(found) * 1e6, 1),
        "with_scores_us": round(statistics.median(read) * 1e6, 1),
    }


def main() -> None:
    """Measure and print."""
    blocks, repeats = (int(argument) for argument in sys.argv[1:])
    rng = np.random.default_rng(SEED)
    figures = {"store": store(rng, blocks)}
    figures |= {f"lookup_{length}": lookups(rng, length, repeats) for length in LENGTHS}
    print(json.dumps({"version": version("ai-dynamo-runtime"), "figures": figures}))


if __name__ == "__main__":
    main()
