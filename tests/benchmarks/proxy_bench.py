"""What a proxy costs: this router beside its peers, on the same engines, in the same run.

    python tests/benchmarks/proxy_bench.py [--quick] [--only ours] [--output build/bench/proxy.json]

Four engines that cost nothing (proxy_backend.py), load and, for this router, Redis and sidecars run
on one core; every proxy is bound to the other one. CPU is user + system time of a proxy's process
tree by the kernel's clock, less what it uses while idle, measured just before the load:

- `cpu_us_per_chunk` is a slope: the same requests at the same pace in so many streams, answered
  once with 4 and once with 40 events, one event in each HTTP chunk; the difference of CPU over the
  difference of events.
- `cpu_us_per_request` is CPU of the answers with 4 events less their chunks, over the requests.
- `added_p50_s`, `added_p99_s` are quantiles of the time to the first event through the proxy, less
  the same quantile of requests that went to the engines directly in the same seconds: one direct
  stream runs beside each 16 proxied ones. Streams are short: one lasts 0.1 s when alone, 1 s among
  64, 4 s among 512, so 10, 64 and 128 requests a second arrive; but no more than 100,000 tokens of
  first turns a second.
- `rps_per_core` is what a core full of such requests takes: 1 / (CPU of a request and of 4 chunks).
- `rss_mib` is the resident memory of the process tree behind the run.

A first turn is a chat nobody has seen; a follow-up continues one that this proxy has seen, and
whose blocks the engines' KV events have told. `index_cpu_us_per_request` is what Redis and the
sidecars used besides, in this router's case.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from transformers import AutoTokenizer

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from proxy_load import Chat, Samples, chats, play  # noqa: E402 - a program finds them so
from proxy_targets import ROOT, Stage, Target  # noqa: E402
from waiting import until  # noqa: E402

EVENTS_FEW, EVENTS_MANY = 4, 40
LENGTH_S = {1: 0.1, 64: 1.0, 512: 4.0}
REQUESTS = {1: 40, 64: 192, 512: 512}
PROMPTS = (256, 8_192, 32_768)
CHATS_MAX = 128
"""Further follow-ups are further turns of these: what engines hold has to fit into the index."""

NEW_TOKENS_PER_S = 100_000
"""First turns come no faster: engines could not prefill more, and a router that tokenizes would
be measured in overload."""

IDLE_S = 1.0
TURNS = ("first", "follow-up")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One load: so many streams of prompts so long."""

    streams: int
    prompt_tokens: int
    requests: int


@dataclass(kw_only=True)
class Bench:
    """What runs."""

    stage: Stage
    targets: Sequence[Target]
    tokenizer: Any
    slopes: dict[tuple[str, str, int], float]
    runs: list[dict[str, Any]]

    async def measure(self, cell: Cell, seed: int) -> None:
        """First turns through every target, then follow-ups of chats whose blocks are told."""
        turns = 1 + math.ceil(cell.requests / CHATS_MAX)
        some = chats(cell.requests, prompt_tokens=cell.prompt_tokens, turns=turns, seed=seed)
        first = [one.body(0, EVENTS_FEW) for one in some]
        told = some[:CHATS_MAX]
        later = [one.body(1 + i, EVENTS_FEW) for i in range(turns - 1) for one in told]
        await self._name_prompts(some)
        for target in self.targets:
            await self._run(cell, target, "first", first)
        await self._tell(told)
        for target in self.targets:
            await self._run(cell, target, "follow-up", later[: cell.requests])

    async def measure_chunks(self, cell: Cell, seed: int) -> None:
        """The slope of CPU over chunks, for every target."""
        for number, target in enumerate(self.targets):
            some = chats(2 * cell.requests, prompt_tokens=64, turns=1, seed=seed + number)
            await self._name_prompts(some)
            used = []
            for part, events in ((some[::2], EVENTS_FEW), (some[1::2], EVENTS_MANY)):
                bodies = [one.body(0, events) for one in part]
                cpu_s, proxied, _ = await self._play(cell, target, bodies, events)
                used.append((cpu_s, proxied.events))
            more = used[1][1] - used[0][1]
            slope = (used[1][0] - used[0][0]) / more if more > 0 else math.nan
            self.slopes[target.target, target.policy, cell.streams] = slope

    async def _run(self, cell: Cell, target: Target, turn: str, bodies: Sequence[bytes]) -> None:
        before_s = target.helpers_cpu_s()
        pace_s = cell.streams * cell.prompt_tokens / NEW_TOKENS_PER_S if turn == "first" else 0.0
        cpu_s, proxied, direct = await self._play(cell, target, bodies, EVENTS_FEW, pace_s)
        helpers_s = target.helpers_cpu_s() - before_s
        chunk_s = self.slopes[target.target, target.policy, cell.streams]
        request_s = (cpu_s - chunk_s * proxied.events) / len(bodies)
        run = {
            "target": target.target,
            "policy": target.policy,
            "streams": cell.streams,
            "prompt_tokens": cell.prompt_tokens,
            "turn": turn,
            "requests": len(bodies),
            "errors": proxied.errors,
            "cpu_us_per_request": round(request_s * 1e6, 1),
            "cpu_us_per_chunk": round(chunk_s * 1e6, 2),
            "added_p50_s": round(proxied.quantile_s(0.5) - direct.quantile_s(0.5), 6),
            "added_p99_s": round(proxied.quantile_s(0.99) - direct.quantile_s(0.99), 6),
            "rps_per_core": round(1 / max(request_s + EVENTS_FEW * chunk_s, 1e-9), 1),
            "rss_mib": round(target.rss_mib(), 1),
        }
        if target.helpers:
            run["index_cpu_us_per_request"] = round(helpers_s / len(bodies) * 1e6, 1)
        self.runs.append(run)
        self.runs.append(_direct(cell, turn, direct))
        print(_line(run), file=sys.stderr)

    async def _play(
        self,
        cell: Cell,
        target: Target,
        bodies: Sequence[bytes],
        events: int,
        length_min_s: float = 0.0,
    ) -> tuple[float, Samples, Samples]:
        """CPU beyond idling, what came through the proxy, what came directly."""
        length_s = max(LENGTH_S[cell.streams], length_min_s)
        await self._engines("tick", length_s / events)
        before_s, begun_s = target.cpu_s(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        idle_ratio = (target.cpu_s() - before_s) / (time.perf_counter() - begun_s)
        before_s, begun_s = target.cpu_s(), time.perf_counter()
        proxied, direct = await play(
            target.url,
            self.stage.urls,
            bodies,
            streams=cell.streams,
            events=events,
            length_s=length_s,
        )
        took_s = time.perf_counter() - begun_s
        if proxied.errors:
            print(f"{target.target}: {proxied.errors} errors: {proxied.problem!r}", file=sys.stderr)
        return target.cpu_s() - before_s - idle_ratio * took_s, proxied, direct

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
            await self._engines("prompt", named)

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

    async def _engines(self, what: str, said: object) -> None:
        for url in self.stage.urls:
            await self._post(url, what, said)

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
        "added_p50_s": 0.0,
        "added_p99_s": 0.0,
        "rps_per_core": None,
        "rss_mib": 0.0,
        "first_event_p50_s": round(direct.quantile_s(0.5), 6),
        "first_event_p99_s": round(direct.quantile_s(0.99), 6),
    }


# -- what is printed ------------------------------------------------------------------------------


def _line(run: dict[str, Any]) -> str:
    return (
        f"{run['target'] + ' ' + run['policy']:26}{run['streams']:5}{run['prompt_tokens']:8}  "
        f"{run['turn']:10}{run['requests']:6}{run['errors']:5}"
        f"{run['cpu_us_per_request']:10.0f}{run['cpu_us_per_chunk']:8.1f}"
        f"{run['added_p50_s'] * 1e3:9.2f}{run['added_p99_s'] * 1e3:9.2f}"
        f"{run['rps_per_core']:9.0f}{run['rss_mib']:8.0f}"
    )


HEADING = (
    f"{'target, policy':26}{'strms':>5}{'prompt':>8}  {'turn':10}{'reqs':>6}{'errs':>5}"
    f"{'us/req':>10}{'us/chk':>8}{'+p50 ms':>9}{'+p99 ms':>9}{'rps/core':>9}{'RSS MiB':>8}"
)


def bars(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Where this router keeps its bars and where it loses, cell by cell."""
    ours = [run for run in runs if run["target"] == "ours"]
    peers = [run for run in runs if run["target"] not in {"ours", "direct"}]
    lines = []
    for mine in ours:
        cell = [mine[key] for key in ("streams", "prompt_tokens", "turn")]
        where = "{} streams, {} tokens, {}".format(*cell)
        rivals = [
            one
            for one in peers
            if [one[key] for key in ("streams", "prompt_tokens", "turn")] == cell
        ]
        for figure, unit in (
            ("cpu_us_per_chunk", "us a chunk"),
            ("cpu_us_per_request", "us a request"),
            ("rss_mib", "MiB"),
        ):
            if figure == "cpu_us_per_chunk" and (cell[1], cell[2]) != (PROMPTS[0], "first"):
                continue  # measured once for so many streams
            better = [one for one in rivals if one[figure] < mine[figure]]
            if better:
                names = ", ".join(
                    f"{one['target']} {one['policy']} {one[figure]:g}" for one in better
                )
                lines.append(f"loses: {where}: {mine[figure]:g} {unit}; {names}")
        if mine["added_p50_s"] > 0.0015 and mine["prompt_tokens"] <= 8_192:
            lines.append(f"above 1.5 ms: {where}: added P50 {mine['added_p50_s'] * 1e3:.2f} ms")
    return lines


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
        subject = Bench(stage=stage, targets=targets, tokenizer=tokenizer, slopes={}, runs=[])
        machine = {"cores": os.cpu_count(), "load_average_before": round(os.getloadavg()[0], 2)}
        print(HEADING, file=sys.stderr)
        seed = int(time.time()) << 8
        for streams in args.streams or LENGTH_S:
            requests = REQUESTS[streams] // (2 if args.quick and streams < max(REQUESTS) else 1)
            await subject.measure_chunks(
                Cell(streams=streams, prompt_tokens=64, requests=requests), seed
            )
            seed += len(targets)
            for prompt_tokens in args.prompts or (PROMPTS[:2] if args.quick else PROMPTS):
                cell = Cell(streams=streams, prompt_tokens=prompt_tokens, requests=requests)
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
    targets = [await stage.ours()]
    peers = [
        (stage.vllm_router, "round_robin"),
        (stage.vllm_router, "cache_aware"),
        (stage.vllm_router, "kv_aware"),
        (stage.sglang_router, "cache_aware"),
    ]
    if args.only == "ours":
        return targets
    async with asyncio.TaskGroup() as tasks:
        starts = [tasks.create_task(_started(start, args.peers, policy)) for start, policy in peers]
    targets += [one for task in starts if (one := task.result()) is not None]
    return targets


async def _started(
    start: Callable[[Path, str], Awaitable[Target]], python: Path, policy: str
) -> Target | None:
    try:
        return await start(python, policy)
    except (AssertionError, OSError) as error:
        print(f"left out: {start.__name__} {policy}: {error}", file=sys.stderr)
        return None


def main() -> None:
    """Run, write the figures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests, no 32k prompts")
    parser.add_argument("--only", choices=["ours"], help="leave the peers out")
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
            print(_line(run))
    print("\n".join(bars(figures["runs"])))


if __name__ == "__main__":
    main()
