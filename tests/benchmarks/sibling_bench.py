"""What the credit for siblings in flight does to bursts of equal new prompts, on one local fleet.

    python tests/benchmarks/sibling_bench.py [--quick] [--output build/bench/siblings.json]

A fleet of simulated engines, with sidecars and embedded Redis, and two pairs of routers in front of
it: one pair with `in_flight_credit`, one without. The same schedule is played through either pair
in turn, several times, with fresh prompts each time. A schedule has bursts of 32 equal new prompts
of 8,192 tokens within 50 ms, and on top of that by scenario:

    uneven  routed requests of 512 to 4,096 new tokens in Poisson arrivals, 20 % of what the engines
            can prefill; and half of the engines also serve a job that does not come through the
            routers: 16 requests of 2,048 to 6,144 new tokens at a time, each
    even    the routed requests alone, of 1,024 to 16,384 new tokens, 60 %
    idle    nothing

With equal engines the product score spreads a burst with the credit as without: to wait for a
sibling's prefill costs as much as to do it again elsewhere, where fewer requests run. TTFT is the
client's, in the engines' time, which may pass more slowly on a small or busy machine
(`--speedup 0.5`). A whole run takes five minutes at speed 1 and says how busy the machine was.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from deploy.local.config import FleetConfig
from deploy.local.fleet import LocalFleet
from deploy.local.part import Part
from deploy.local.ports import PortPicker

PROFILE = "a100-llama-3.1-8b"
PREFILL_TOKENS_PER_S = 12_000
ENGINES = 6
BURST = 32
BURST_TOKENS = 8_192
BURST_WITHIN_S = 0.05
BURST_EVERY_S = 4.0
OUTPUT_TOKENS = 32
JOB_ENGINES = ENGINES // 2
JOB_IN_FLIGHT = 16
JOB_TOKENS = (2_048, 6_144)
JOB_OUTPUT_TOKENS = 128
WARM_S = 3.0
VOCABULARY = 1_000
SEED = 20261130
DEADLINE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the bursts come on top of."""

    load_ratio: float  # routed prefill tokens / what the engines can prefill
    prompt_tokens: tuple[int, int]
    job: bool


SCENARIOS = {
    "uneven": Scenario(load_ratio=0.2, prompt_tokens=(512, 4_096), job=True),
    "even": Scenario(load_ratio=0.6, prompt_tokens=(1_024, 16_384), job=False),
    "idle": Scenario(load_ratio=0.0, prompt_tokens=(1, 2), job=False),
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One request of a schedule."""

    at_s: float
    prompt_tokens: int
    burst: int | None  # number of its burst, whose prompts are equal


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What its client saw."""

    burst: int | None
    ttft_s: float
    instance: str
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int


def schedule(
    rng: np.random.Generator, scenario: Scenario, *, bursts: int, first_burst: int
) -> list[Planned]:
    """Arrival times and lengths, without contents; bursts are numbered from first_burst."""
    planned = []
    end_s = WARM_S + bursts * BURST_EVERY_S
    lengths = scenario.prompt_tokens
    if scenario.load_ratio:
        rate = ENGINES * PREFILL_TOKENS_PER_S * scenario.load_ratio / np.mean(lengths)
        at_s = float(rng.exponential(1 / rate))
        while at_s < end_s:
            tokens = int(rng.integers(*lengths))
            planned.append(Planned(at_s=at_s, prompt_tokens=tokens, burst=None))
            at_s += float(rng.exponential(1 / rate))
    for burst in range(bursts):
        start_s = WARM_S + burst * BURST_EVERY_S
        planned += [
            Planned(
                at_s=start_s + float(late_s), prompt_tokens=BURST_TOKENS, burst=first_burst + burst
            )
            for late_s in rng.uniform(0, BURST_WITHIN_S, BURST)
        ]
    return sorted(planned, key=lambda one: one.at_s)


class Client:
    """Plays schedules; no prompt is ever used twice but within its burst."""

    def __init__(self, session: aiohttp.ClientSession, speedup: float) -> None:
        self._session = session
        self._speedup = speedup
        self._fresh = np.random.default_rng(SEED)

    def _prompt(self, tokens: int) -> list[int]:
        ids: list[int] = self._fresh.integers(1, VOCABULARY, tokens).tolist()
        return ids

    async def play(self, url: str, planned: Sequence[Planned]) -> list[Answered]:
        """One schedule through one pair of routers, to its last answer."""
        bursts = {one.burst for one in planned}
        equal = {burst: self._body(self._prompt(BURST_TOKENS)) for burst in bursts}
        bodies = [
            self._body(self._prompt(one.prompt_tokens)) if one.burst is None else equal[one.burst]
            for one in planned
        ]
        start_s = time.perf_counter() + 0.2

        async def send(one: Planned, body: bytes) -> Answered:
            at_s = start_s + one.at_s / self._speedup
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
            return await self._send(url, one, body)

        async with asyncio.timeout(DEADLINE_S / self._speedup), asyncio.TaskGroup() as tasks:
            sent = [
                tasks.create_task(send(one, body))
                for one, body in zip(planned, bodies, strict=True)
            ]
        return [task.result() for task in sent]

    @asynccontextmanager
    async def job(self, engine_urls: Sequence[str]) -> AsyncIterator[None]:
        """Requests that go to the engines directly, so many in flight on each, until the end."""

        async def one_after_the_other(url: str) -> None:
            while True:
                prompt = self._prompt(int(self._fresh.integers(*JOB_TOKENS)))
                body = {"model": "sim", "prompt": prompt, "max_tokens": JOB_OUTPUT_TOKENS}
                async with self._session.post(f"{url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    await answer.read()

        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(one_after_the_other(url))
                for url in engine_urls
                for _ in range(JOB_IN_FLIGHT)
            ]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    @staticmethod
    def _body(prompt: list[int]) -> bytes:
        return json.dumps(
            {
                "model": "sim",
                "prompt": prompt,
                "max_tokens": OUTPUT_TOKENS,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def _send(self, url: str, one: Planned, body: bytes) -> Answered:
        headers = {"Content-Type": "application/json", "x-timestable-explain": "1"}
        start_s = time.perf_counter()
        async with self._session.post(
            f"{url}/v1/completions", data=body, headers=headers
        ) as answer:
            answer.raise_for_status()
            chunks = [await answer.content.readany()]
            ttft_s = time.perf_counter() - start_s
            while chunk := await answer.content.readany():
                chunks.append(chunk)
        usage = json.loads(b"".join(chunks).split(b"data: ")[-2])["usage"]
        return Answered(
            burst=one.burst,
            ttft_s=ttft_s * self._speedup,
            instance=answer.headers["x-timestable-instance"],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
            predicted_tokens=json.loads(answer.headers["x-timestable-decision"])["hit_tokens"],
        )


def summary(answers: Sequence[Answered]) -> dict[str, Any]:
    """Figures of one setting in one scenario; times in seconds."""
    bursts = [one for one in answers if one.burst is not None]
    background = [one for one in answers if one.burst is None]
    used: dict[int, set[str]] = {}
    for one in bursts:
        assert one.burst is not None
        used.setdefault(one.burst, set()).add(one.instance)

    def ttft(of: Sequence[Answered]) -> dict[str, float] | None:
        if not of:
            return None
        ttfts = np.array([one.ttft_s for one in of])
        return {
            "mean": round(float(ttfts.mean()), 3),
            "p50": round(float(np.percentile(ttfts, 50)), 3),
            "p99": round(float(np.percentile(ttfts, 99)), 3),
        }

    return {
        "bursts": len(used),
        "burst_ttft_s": ttft(bursts),
        "background_requests": len(background),
        "background_ttft_s": ttft(background),
        "instances_per_burst_mean": round(
            float(np.mean([len(names) for names in used.values()])), 2
        ),
        "burst_tokens_prefilled_per_burst": round(
            sum(one.prompt_tokens - one.cached_tokens for one in bursts) / len(used)
        ),
        "predictions_exact_ratio": round(
            sum(one.predicted_tokens == one.cached_tokens for one in answers) / len(answers), 4
        ),
    }


@asynccontextmanager
async def fleets(folder: Path, speedup: float) -> AsyncIterator[tuple[dict[str, str], list[str]]]:
    """One fleet behind two pairs of routers: setting -> URL of the pair; URLs of the engines."""
    config = FleetConfig(
        workers=ENGINES,
        routers=2,
        profile=PROFILE,
        speedup=speedup,
        run_dir=folder,
        router_port=18_000,
        admin_port=18_010,
        engine_port=18_100,
        event_port=18_200,
        metrics_port=18_300,
        redis_port=18_400,
        log_level="warning",
    )
    async with LocalFleet.running(config, lambda _: None) as fleet, asyncio.TaskGroup() as watchers:
        ports = PortPicker(host=config.host)
        port = ports.pick(18_500)
        others = []
        for number, layout in enumerate(fleet.layout.routers, start=1):
            admin_port = ports.pick(18_510)
            command = [
                *(flag for flag in layout.command if not flag.startswith(("--port", "--admin"))),
                f"--port={port}",
                f"--admin_port={admin_port}",
                "--in_flight_credit=false",
            ]
            other = Part(
                name=f"router-without-{number}",
                command=command,
                log_path=folder / "logs" / f"router-without-{number}.log",
                environment=fleet.routers[0].environment,
            )
            others.append(other)
            await other.start()
            watchers.create_task(other.watch())
            await _ready(f"http://{config.host}:{admin_port}")
        try:
            routers = {"with": fleet.layout.router_url, "without": f"http://{config.host}:{port}"}
            yield routers, [worker.engine_url for worker in fleet.layout.workers]
        finally:
            for other in others:
                await other.stop(config.drain_s)


async def _ready(admin_url: str) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{admin_url}/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(0.1)


async def measure(*, bursts: int, turns: int, speedup: float) -> dict[str, Any]:
    """All scenarios, both settings in turn."""
    rng = np.random.default_rng(SEED)
    figures: dict[str, Any] = {}
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            fleets(Path(folder), speedup) as (urls, engine_urls),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            client = Client(session, speedup)
            for name, scenario in SCENARIOS.items():
                answers: dict[str, list[Answered]] = {setting: [] for setting in urls}
                async with client.job(engine_urls[: JOB_ENGINES if scenario.job else 0]):
                    for turn in range(turns):
                        planned = schedule(rng, scenario, bursts=bursts, first_burst=turn * bursts)
                        # Who goes first changes from turn to turn.
                        for setting in list(urls)[:: 1 if turn % 2 == 0 else -1]:
                            before, start_s = _machine_busy_s(), time.perf_counter()
                            answers[setting] += await client.play(urls[setting], planned)
                            took_s = time.perf_counter() - start_s
                            busy.append((_machine_busy_s() - before) / took_s)
                figures[name] = {setting: summary(seen) for setting, seen in answers.items()}
    return {
        "scenario": {
            "engines": ENGINES,
            "speedup": speedup,
            "profile": PROFILE,
            "burst": f"{BURST} equal new prompts of {BURST_TOKENS} tokens within "
            f"{BURST_WITHIN_S * 1000:g} ms, every {BURST_EVERY_S:g} s",
            "output_tokens": OUTPUT_TOKENS,
            "job": f"on {JOB_ENGINES} engines, {JOB_IN_FLIGHT} requests at a time of "
            f"{JOB_TOKENS[0]} to {JOB_TOKENS[1]} tokens, {JOB_OUTPUT_TOKENS} out, not routed",
            **{name: asdict(scenario) for name, scenario in SCENARIOS.items()},
        },
        "machine": {
            "cores": os.cpu_count(),
            "cores_busy_mean": round(float(np.mean(busy)), 2),
            "cores_busy_max": round(float(np.max(busy)), 2),
        },
        **figures,
    }


def _machine_busy_s() -> float:
    """Core seconds this machine has worked since it started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the bursts")
    parser.add_argument("--speedup", type=float, default=1.0, help="engine seconds in a real one")
    parser.add_argument("--output", type=Path, default=Path("build/bench/siblings.json"))
    args = parser.parse_args()
    bursts, turns = (2, 1) if args.quick else (4, 2)
    figures = asyncio.run(measure(bursts=bursts, turns=turns, speedup=args.speedup))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
