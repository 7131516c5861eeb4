"""Whether 2, 4 and 8 router processes decide like one, and what it costs them not to share.

    python tests/benchmarks/router_bench.py [--quick] [--output build/bench/routers.json]

One fleet of 16 simulated engines, with sidecars and embedded Redis; eight router processes that
share reservations, of which the first 1, 2, 4 or 8 get the requests, and eight that do not
(`--share_reservations false`). The same schedule is played through each group in turn, from cold
engines, for every seed; who goes first changes from seed to seed. Which router of a group gets a
request is drawn at random, the same way in every run. One router is played twice a seed: the
difference between its two runs is what the machine itself adds.

Engines run at `--speedup` engine seconds a second, so that a small machine keeps up; sidecars look
at their engines as much less often, so that counters are as old in engine time as at speed 1. All
times are engine times. Prompts are token ids. A full run takes twenty minutes on two cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from router_bench_plan import (
    BLOCK,
    PREFILL_TOKENS_PER_S,
    cell_figures,
    run_figures,
    schedule,
    table,
)

from deploy.demo.fleet_state import FleetState
from deploy.local.config import FleetConfig
from deploy.local.fleet import LocalFleet, instances_seen
from deploy.local.part import Part
from deploy.local.ports import PortPicker
from indexer.contract import functions, reservations
from indexer.contract.link import connected
from loadgen.client import StreamingClient, Target
from loadgen.records import RequestRecord
from loadgen.tokens import PromptTokens
from loadgen.trace import TraceRow

ENGINES = 16
ROUTERS = 8
PROFILE = "a100-llama-3.1-8b"
SCRAPE_S = 0.1  # engine time
SAMPLE_S = 0.1  # engine time
VOCABULARY = 4_096
DEADLINE_S = 120.0
START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Group:
    """A cell of the table: so many routers of one kind."""

    name: str
    routers: int
    share: bool


GROUPS = (
    Group(name="1 router", routers=1, share=True),
    Group(name="1 router again", routers=1, share=True),
    Group(name="2 routers", routers=2, share=True),
    Group(name="4 routers", routers=4, share=True),
    Group(name="8 routers", routers=8, share=True),
    Group(name="4 not sharing", routers=4, share=False),
    Group(name="8 not sharing", routers=8, share=False),
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What runs, and how it is asked."""

    state: FleetState
    urls: dict[bool, list[str]]  # whether reservations are shared -> routers
    speedup: float

    async def play(self, group: Group, rows: Sequence[TraceRow], seed: int) -> dict[str, float]:
        """One schedule through one group of routers, from cold engines to the last answer."""
        prompts = PromptTokens(vocabulary_tokens=VOCABULARY, seed=0)
        starts = {row.block_ids[0]: row.block_ids[:1] for row in rows}.values()
        first_blocks = [
            prompts.token_ids(start, prompt_tokens=BLOCK, block_size_tokens=BLOCK).tolist()
            for start in starts
        ]
        await self.state.make_cold(first_blocks)
        urls = self.urls[group.share][: group.routers]
        clients = [
            StreamingClient(Target(url=url, model="sim", vocabulary_tokens=VOCABULARY))
            for url in urls
        ]
        drawn = np.random.default_rng(seed).random(len(rows)) * len(clients)
        busy_s, begun_s = _machine_busy_s(), time.perf_counter()
        batches: list[list[int]] = []
        async with asyncio.timeout(DEADLINE_S / self.speedup), asyncio.TaskGroup() as tasks:
            sampler = tasks.create_task(self._sample(batches))
            records = await self._send(rows, [clients[int(place)] for place in drawn])
            sampler.cancel()
        took_s = time.perf_counter() - begun_s
        for client in clients:
            client.close()
        figures = run_figures(records, batches, engines=ENGINES, speedup=self.speedup)
        late_s = [(one.sent_s or 0.0) - one.scheduled_s for one in records]
        return figures | {
            "cores_busy": (_machine_busy_s() - busy_s) / took_s,
            "took_s": took_s,
            "sent_late_p99_s": float(np.percentile(late_s, 99)),
        }

    async def _send(
        self, rows: Sequence[TraceRow], clients: Sequence[StreamingClient]
    ) -> list[RequestRecord]:
        sent = []
        start_s = time.monotonic() + 0.2
        async with asyncio.TaskGroup() as tasks:
            for index, (row, client) in enumerate(zip(rows, clients, strict=True)):
                at_s = row.arrival_s / self.speedup
                call = client.prepare(row, row_index=index, scheduled_s=at_s)
                await asyncio.sleep(start_s + at_s - time.monotonic())
                sent.append(tasks.create_task(client.send(call, start_s=start_s)))
        return [task.result() for task in sent]

    async def _sample(self, batches: list[list[int]]) -> None:
        """Running and waiting requests of each engine, as it reports them."""
        record = await self.state.record()
        while True:
            reply = await functions.run(self.state.redis, reservations.read(record.fleet_id))
            counters = reservations.fleet_counters(reply)
            assert counters is not None
            slots = counters.slots[counters.slots["flags"] != 0]
            batches.append((slots["running_count"] + slots["waiting_count"]).tolist())
            await asyncio.sleep(SAMPLE_S / self.speedup)


@asynccontextmanager
async def running(folder: Path, speedup: float) -> AsyncIterator[Bench]:
    """The fleet and all routers."""
    config = FleetConfig(
        workers=ENGINES,
        routers=1,  # it has to have one, which gets no request
        profile=PROFILE,
        block_size_tokens=BLOCK,
        speedup=speedup,
        run_dir=folder,
        router_port=19_000,
        admin_port=19_010,
        engine_port=19_100,
        event_port=19_200,
        metrics_port=19_300,
        redis_port=19_400,
        log_level="warning",
        ready_deadline_s=START_S,
    )
    os.environ["TIMESTABLE_INDEXER_SCRAPE_INTERVAL_S"] = f"{SCRAPE_S / speedup:g}"
    async with (
        LocalFleet.running(config, lambda _: None) as fleet,
        asyncio.TaskGroup() as watchers,
        aiohttp.ClientSession() as session,
        connected(fleet.layout.redis_url, deadline_s=10.0) as link,
    ):
        processes = list(_router_processes(fleet, folder))
        try:
            for one in processes:
                await one.part.start()
                watchers.create_task(one.part.watch())
            for one in processes:
                await _ready(session, one.admin_url)
            state = FleetState(
                redis=link,
                session=session,
                model_name=config.model_name,
                engine_urls=[worker.engine_url for worker in fleet.layout.workers],
            )
            urls = {
                share: [one.url for one in processes if one.share == share]
                for share in (True, False)
            }
            yield Bench(state=state, urls=urls, speedup=speedup)
        finally:
            async with asyncio.TaskGroup() as stops:
                for one in processes:
                    stops.create_task(one.part.stop(config.drain_s))


@dataclass(frozen=True, kw_only=True)
class RouterProcess:
    """A router on a port of its own."""

    share: bool
    url: str
    admin_url: str
    part: Part


def _router_processes(fleet: LocalFleet, folder: Path) -> Iterator[RouterProcess]:
    """Eight that share and eight that do not, not started yet."""
    host = fleet.config.host
    ports = PortPicker(host=host)
    command = [
        flag
        for flag in fleet.layout.routers[0].command
        if not flag.startswith(("--port", "--admin_port"))
    ]
    for share in (True, False):
        for number in range(1, ROUTERS + 1):
            port, admin_port = ports.pick(19_500), ports.pick(19_600)
            name = f"router-{'sharing' if share else 'unshared'}-{number}"
            options = [
                f"--port={port}",
                f"--admin_port={admin_port}",
                f"--share_reservations={str(share).lower()}",
            ]
            part = Part(
                name=name,
                command=[*command, *options],
                log_path=folder / "logs" / f"{name}.log",
                environment=fleet.routers[0].environment,
            )
            yield RouterProcess(
                share=share,
                url=f"http://{host}:{port}",
                admin_url=f"http://{host}:{admin_port}",
                part=part,
            )


async def _ready(session: aiohttp.ClientSession, admin_url: str) -> None:
    """A router is ready when it sees every engine and no longer loads their tokenizer."""
    loaded = 'timestable_router_tokenizer_loaded{model="sim"} 1.0'
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(f"{admin_url}/metrics") as answer:
                    metrics = await answer.text()
                if loaded in metrics and await instances_seen(session, admin_url) == ENGINES:
                    return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)


async def measure(
    *,
    seeds: Sequence[int],
    groups: Sequence[Group],
    load_ratio: float,
    length_s: float,
    speedup: float,
) -> dict[str, Any]:
    """Every group with every seed."""
    runs: dict[str, list[dict[str, float]]] = {group.name: [] for group in groups}
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), speedup) as bench:
            for turn, seed in enumerate(seeds):
                rows = schedule(seed, engines=ENGINES, load_ratio=load_ratio, length_s=length_s)
                first = turn * 3 % len(groups)
                for group in (*groups[first:], *groups[:first]):
                    run = await bench.play(group, rows, seed)
                    runs[group.name].append(run)
                    print(
                        f"seed {seed}, {group.name}: {run['requests']:.0f} requests, "
                        f"mean TTFT {run['ttft_mean_s']:.3f} s, "
                        f"{run['cores_busy']:.2f} cores busy",
                        file=sys.stderr,
                    )
    every = [run for some in runs.values() for run in some]
    base = runs[groups[0].name]
    return {
        "scenario": {
            "engines": ENGINES,
            "profile": PROFILE,
            "speedup": speedup,
            "scrape_interval_engine_s": SCRAPE_S,
            "length_engine_s": length_s,
            "seeds": list(seeds),
            "load_ratio_planned": load_ratio,
            "requests_per_engine_s": round(
                float(np.mean([run["requests"] for run in base])) / length_s, 2
            ),
            "load_ratio": round(
                float(np.mean([run["prefilled_tokens"] for run in base]))
                / (length_s * ENGINES * PREFILL_TOKENS_PER_S),
                3,
            ),
        },
        "machine": {
            "cores": os.cpu_count(),
            "cores_busy_mean": round(float(np.mean([run["cores_busy"] for run in every])), 2),
            "cores_busy_max": round(float(np.max([run["cores_busy"] for run in every])), 2),
            "sent_late_p99_s_max": round(max(run["sent_late_p99_s"] for run in every), 4),
            "took_s": round(time.perf_counter() - begun_s),
        },
        "cells": {name: cell_figures(some, base) for name, some in runs.items()},
    }


def _machine_busy_s() -> float:
    """Core seconds this machine has worked since it started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run, write the figures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, three groups, shorter")
    parser.add_argument("--groups", help="names, separated by commas, the first is one router")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--load", type=float, default=0.6, help="of the prefill capacity")
    parser.add_argument("--length_s", type=float, help="of a schedule, in engine seconds")
    parser.add_argument("--speedup", type=float, default=0.3, help="engine seconds in a real one")
    parser.add_argument("--output", type=Path, default=Path("build/bench/routers.json"))
    args = parser.parse_args()
    groups = [GROUPS[i] for i in (0, 4, 6)] if args.quick else GROUPS
    if args.groups:
        by_name = {group.name: group for group in GROUPS}
        groups = [by_name[name.strip()] for name in args.groups.split(",")]
    figures = uvloop.run(
        measure(
            seeds=range(1, 1 + (args.seeds or (2 if args.quick else 5))),
            groups=groups,
            load_ratio=args.load,
            length_s=args.length_s or (5.0 if args.quick else 8.0),
            speedup=args.speedup,
        )
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1))
    print(json.dumps({"scenario": figures["scenario"], "machine": figures["machine"]}, indent=1))
    print(table(figures["cells"]))


if __name__ == "__main__":
    main()
