"""What a proxy costs: this router beside its peers, on the same engines, in the same run.

    python tests/benchmarks/proxy_bench.py [--quick] [--only ours] [--output build/bench/proxy.json]

Four engines that cost nothing (proxy_backend.py), load and, for this router, Redis and sidecars run
on one core; every proxy is bound to the other one. CPU is user + system time of a proxy's process
tree by the kernel's clock, less what it uses while idle, measured between the rounds of streams:

- `cpu_us_per_chunk` is what an event costs in the middle of streams, the median of alternating
  rounds, and `cpu_us_per_chunk_spread` their range (proxy_steady.py); where the worst round's
  `chunks_in_time_ratio` is well below 1, something had no CPU and the cost is read as too small.
- `cpu_us_per_request` is CPU of answers with 4 events less the cost of their chunks, over the
  requests.
- `added_p50_s`, `added_p99_s` are quantiles of the time to the first event through the proxy, less
  the same quantile of requests that went to the engines directly in the same seconds: one direct
  stream runs beside each 16 busy ones.
- `rps_per_core` is what a core full of such requests takes: 1 / (CPU of a request and of 4 chunks).
- `rss_mib` is the resident memory of the process tree behind the run.

So many streams are open all the time: as many as the pace needs ask one request after another, and
the others are held, an open answer that says nothing more. The pace is 10, 64 and 128 requests a
second at 1, 64 and 512 streams, but no more than 100,000 prompt tokens a second that have to be
tokenized, and a million that have been before: a proxy takes half a core for either, and what is
measured is no waiting for that core. Dynamo's frontend tokenizes follow-ups whole, so they come to
it as slowly as first turns. A run ends after 4 s, so that there are fewer requests of long prompts.

A first turn is a chat nobody has seen; a follow-up continues one that this proxy has seen, and
whose blocks the engines' KV events have told. `index_cpu_us_per_request` is what Redis and the
sidecars used beyond idling, in this router's case.

Dynamo's frontend is no proxy of HTTP: its workers (proxy_dynamo.py) speak a protocol of its own, so
engines beside it are others, which send token ids. It tokenizes, detokenizes and writes the events
itself, which the other peers leave to engines; policy `kv` knows the blocks by the same KV events.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import uvloop
from transformers import AutoTokenizer

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from proxy_backend import HELD_TOKENS  # noqa: E402 - a program finds them so
from proxy_load import Chat, Samples, chats, opened, play  # noqa: E402
from proxy_report import HEADING, bars, line  # noqa: E402
from proxy_steady import FULL, QUICK, Plan, Steady, steady  # noqa: E402
from proxy_targets import ROOT, Stage, Target  # noqa: E402
from waiting import until  # noqa: E402

EVENTS = 4
LENGTH_S = {1: 0.1, 64: 0.5, 512: 1.0}
PACE_PER_S = {1: 10.0, 64: 64.0, 512: 128.0}
REQUESTS = {1: 30, 64: 128, 512: 512}
PROMPTS = (256, 8_192, 32_768)
QUICK_STREAMS, QUICK_PROMPTS = (1, 64), (8_192,)
NEW_TOKENS_PER_S, KNOWN_TOKENS_PER_S = 100_000, 1_000_000
RUN_S, QUICK_RUN_S = 4.0, 2.5
CHATS_MAX = 128
"""Further follow-ups are further turns of these: what engines hold has to fit into the index."""

TARGETS = ("ours", "vllm-router", "sglang-router", "dynamo")
HELD_PROMPT_TOKENS = 64
SETTLE_S = 0.5
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One load: so many streams of prompts so long, for at most so many seconds."""

    streams: int
    prompt_tokens: int
    run_s: float

    def pace_per_s(self, *, known: bool) -> float:
        """Requests that come in a second; known: their prompts need not be tokenized whole."""
        tokens_per_s = KNOWN_TOKENS_PER_S if known else NEW_TOKENS_PER_S
        return min(PACE_PER_S[self.streams], tokens_per_s / self.prompt_tokens)

    def requests(self, *, known: bool) -> int:
        """How many there are."""
        return min(REQUESTS[self.streams], math.ceil(self.run_s * self.pace_per_s(known=known)))


@dataclass(kw_only=True)
class Bench:
    """What runs."""

    stage: Stage
    targets: Sequence[Target]
    tokenizer: Any
    steady: dict[tuple[str, str, int], Steady]
    runs: list[dict[str, Any]]

    async def measure(self, cell: Cell, seed: int) -> None:
        """First turns through every target, then follow-ups of chats whose blocks are told."""
        count = cell.requests(known=False)
        turns = 1 + math.ceil(cell.requests(known=True) / min(count, CHATS_MAX))
        some = chats(count, prompt_tokens=cell.prompt_tokens, turns=turns, seed=seed)
        first = [one.body(0, EVENTS) for one in some]
        told = some[:CHATS_MAX]
        later = [one.body(1 + i, EVENTS) for i in range(turns - 1) for one in told]
        await self._name_prompts(some)
        for target in self.targets:
            await self._run(cell, target, "first", first, known=False)
        await self._tell(told)
        for target in self.targets:
            known = target.target != "dynamo"
            asked = later[: cell.requests(known=known)]
            await self._run(cell, target, "follow-up", asked, known=known)

    async def measure_chunks(self, streams: int, plan: Plan, seed: int) -> None:
        """What a chunk costs every target, and what it uses while idle."""
        figures = await steady(self.targets, streams, plan, seed, self._tick)
        for target, figure in zip(self.targets, figures, strict=True):
            self.steady[target.target, target.policy, streams] = figure

    async def _run(
        self, cell: Cell, target: Target, turn: str, bodies: Sequence[bytes], *, known: bool
    ) -> None:
        taken = self.steady[target.target, target.policy, cell.streams]
        pace_per_s = cell.pace_per_s(known=known)
        cpu_s, helpers_s, proxied, direct = await self._play(cell, target, bodies, pace_per_s)
        if not proxied.first_s:
            print(f"left out: {target.target} {target.policy}: no answer", file=sys.stderr)
            return
        request_s = (cpu_s - taken.chunk_s * proxied.events) / len(bodies)
        run = {
            "target": target.target,
            "policy": target.policy,
            "streams": cell.streams,
            "prompt_tokens": cell.prompt_tokens,
            "turn": turn,
            "requests": len(bodies),
            "errors": proxied.errors,
            "cpu_us_per_request": round(request_s * 1e6, 1),
            "cpu_us_per_chunk": round(taken.chunk_s * 1e6, 2),
            "cpu_us_per_chunk_spread": round(taken.spread_s * 1e6, 2),
            "chunks_in_time_ratio": round(taken.in_time_ratio, 3),
            "added_p50_s": round(proxied.quantile_s(0.5) - direct.quantile_s(0.5), 6),
            "added_p99_s": round(proxied.quantile_s(0.99) - direct.quantile_s(0.99), 6),
            "rps_per_core": round(1 / max(request_s + EVENTS * taken.chunk_s, 1e-9), 1),
            "rss_mib": round(target.rss_mib(), 1),
        }
        if target.helpers:
            run["index_cpu_us_per_request"] = round(helpers_s / len(bodies) * 1e6, 1)
        self.runs.append(run)
        self.runs.append(_direct(cell, turn, direct))
        print(line(run), file=sys.stderr)

    async def _play(
        self, cell: Cell, target: Target, bodies: Sequence[bytes], pace_per_s: float
    ) -> tuple[float, float, Samples, Samples]:
        """CPU beyond idling and that of helpers, what came through the proxy and directly."""
        length_s = max(LENGTH_S[cell.streams], 1 / pace_per_s)
        busy = max(1, round(pace_per_s * length_s))
        await self._tick(length_s / EVENTS)
        some = chats(
            cell.streams - busy,
            prompt_tokens=HELD_PROMPT_TOKENS,
            turns=1,
            seed=time.monotonic_ns() >> 20,
        )
        async with opened(target.url, [one.body(0, HELD_TOKENS) for one in some]):
            await asyncio.sleep(SETTLE_S)
            before_s, begun_s = target.cpu_s(), time.perf_counter()
            helpers_before_s = target.helpers_cpu_s()
            proxied, direct = await play(
                target.url,
                self.stage.urls,
                bodies,
                streams=busy,
                events=EVENTS,
                length_s=length_s,
            )
            took_s = time.perf_counter() - begun_s
            cpu_s = target.cpu_s() - before_s
            helpers_s = target.helpers_cpu_s() - helpers_before_s
        if proxied.errors:
            print(f"{target.target}: {proxied.errors} errors: {proxied.problem!r}", file=sys.stderr)
        idle = self.steady[target.target, target.policy, cell.streams]
        cpu_s -= idle.idle_ratio * took_s
        return cpu_s, helpers_s - idle.helpers_idle_ratio * took_s, proxied, direct

    def _token_ids(self, chat: Chat, turn: int) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            chat.turn(turn), add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    async def _name_prompts(self, some: Sequence[Chat]) -> None:
        """Engines know the token ids of a chat for kv_aware, which asks them."""
        if not any(target.policy == "kv_aware" for target in self.targets):
            return
        for chat in some:
            named = {"name": chat.name, "token_ids": self._token_ids(chat, 0)}
            for url in self.stage.urls:
                await self._post(url, "prompt", named)

    async def _tell(self, told: Sequence[Chat]) -> None:
        """The engines store the first turns, one engine each, and the index learns of it."""
        for number, chat in enumerate(told):
            url = self.stage.urls[number % len(self.stage.urls)]
            await self._post(url, "store", {"token_ids": self._token_ids(chat, 0)})
        for target in self.targets:
            if target.helpers:
                for chat in told[-len(self.stage.urls) :]:
                    await until(
                        lambda chat=chat, target=target: self._found(target, chat),
                        "the index knows what the engines have told",
                        60.0,
                    )

    async def _found(self, target: Target, chat: Chat) -> bool:
        async with self.stage.session.post(f"{target.url}/route", data=chat.body(1, 1)) as answer:
            return bool((await answer.json())["hit_tokens"])

    async def _tick(self, tick_s: float) -> None:
        for url in (*self.stage.urls, *self.stage.worker_urls):
            await self._post(url, "tick", tick_s)

    async def _post(self, url: str, what: str, said: object) -> None:
        async with self.stage.session.post(f"{url}/bench/{what}", data=json.dumps(said)) as answer:
            assert answer.status == 200, what


def _direct(cell: Cell, turn: str, direct: Samples) -> dict[str, Any]:
    """What the engines did without a proxy meanwhile; nothing is added and no CPU is a proxy's."""
    return {
        "target": "direct",
        "policy": "",
        "streams": cell.streams,
        "prompt_tokens": cell.prompt_tokens,
        "turn": turn,
        "requests": len(direct.first_s),
        "errors": direct.errors,
        "cpu_us_per_request": 0.0,
        "cpu_us_per_chunk": 0.0,
        "cpu_us_per_chunk_spread": 0.0,
        "added_p50_s": 0.0,
        "added_p99_s": 0.0,
        "rps_per_core": None,
        "rss_mib": 0.0,
        "first_event_p50_s": round(direct.quantile_s(0.5), 6),
        "first_event_p99_s": round(direct.quantile_s(0.99), 6),
    }


# -- the run --------------------------------------------------------------------------------------


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, measure every cell; what is measured is written after each."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("needs two cores: one for the proxies, one for all else")
    proxy_core, other_core = cores[0], cores[1]
    os.sched_setaffinity(0, {other_core})
    begun_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stage = Stage(
            stack=stack,
            folder=args.logs or folder,
            proxy_core=proxy_core,
            other_core=other_core,
            session=await stack.enter_async_context(aiohttp.ClientSession()),
            tree_path=args.tree,
        )
        await stage.engines()
        targets = await _targets(stage, args)
        tokenizer = AutoTokenizer.from_pretrained(str(ROOT / "workers" / "simulated" / "tokenizer"))
        subject = Bench(stage=stage, targets=targets, tokenizer=tokenizer, steady={}, runs=[])
        machine = {"cores": os.cpu_count(), "load_average_before": round(os.getloadavg()[0], 2)}
        print(HEADING, file=sys.stderr)
        seed = int(time.time()) << 8
        plan, run_s = (QUICK, QUICK_RUN_S) if args.quick else (FULL, RUN_S)
        for streams in args.streams or (QUICK_STREAMS if args.quick else LENGTH_S):
            await subject.measure_chunks(streams, plan, seed)
            seed += plan.rounds
            for prompt_tokens in args.prompts or (QUICK_PROMPTS if args.quick else PROMPTS):
                cell = Cell(streams=streams, prompt_tokens=prompt_tokens, run_s=run_s)
                await subject.measure(cell, seed)
                seed += 1
                machine |= {
                    "load_average_after": round(os.getloadavg()[0], 2),
                    "took_s": round(time.perf_counter() - begun_s),
                }
                figures = {"machine": machine, "runs": subject.runs}
                args.output.write_text(json.dumps(figures, indent=1))
    return figures


async def _targets(stage: Stage, args: argparse.Namespace) -> list[Target]:
    """This router first: its index must not know the blocks before the follow-ups."""
    python, wanted = args.peers, args.only
    targets = [await stage.ours()] if "ours" in wanted else []
    starts: list[tuple[str, Coroutine[Any, Any, Target]]] = []
    if "vllm-router" in wanted:
        starts += [
            (f"vllm-router {policy}", stage.vllm_router(python, policy))
            for policy in ("round_robin", "cache_aware", "kv_aware")
        ]
    if "sglang-router" in wanted:
        starts += [("sglang-router cache_aware", stage.sglang_router(python, "cache_aware"))]
    workers = await _started("dynamo", stage.dynamo_workers(python)) if "dynamo" in wanted else ()
    if workers:
        starts += [
            (f"dynamo {policy}", stage.dynamo(python, policy)) for policy in ("round-robin", "kv")
        ]
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_started(what, start)) for what, start in starts]
    targets += [one for task in started if (one := task.result()) is not None]
    if not targets:
        raise SystemExit("nothing to measure: none of the wanted targets has started")
    return targets


async def _started(what: str, start: Coroutine[Any, Any, T]) -> T | None:
    try:
        return await start
    except (AssertionError, OSError) as error:
        print(f"left out: {what}: {error}", file=sys.stderr)
        return None


def main() -> None:
    """Run, write the figures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 and 64 streams, 8k prompts")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS, help="targets")
    parser.add_argument(
        "--streams", type=int, nargs="*", choices=sorted(LENGTH_S), help="at a time"
    )
    parser.add_argument("--prompts", type=int, nargs="*", help="tokens of first turns")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout of this router")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--output", type=Path, default=Path("build/bench/proxy.json"))
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figures = uvloop.run(bench(args))
    print(json.dumps(figures["machine"]))
    print(HEADING)
    for run in figures["runs"]:
        if run["target"] != "direct":
            print(line(run))
    print("\n".join(bars(figures["runs"])))


if __name__ == "__main__":
    main()
