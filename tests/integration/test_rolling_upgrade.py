"""Two schema versions of routers and sidecars on one Redis and the same engines."""

import asyncio
import json
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from simulated_engine import Live
from simulated_engine import running as simulated
from waiting import until, until_equal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 40.0
BLOCK = 16
PROMPT_TOKENS = 20 * BLOCK + 1
PROMPTS, ENGINES = 4, 2

SECOND_VERSION = (
    ("*.py", r'(?<=")ts1_', "ts2_"),
    ("*.lua", r"\bts1_", "ts2_"),
    ("limits.py", "SCHEMA_VERSION: Final = 1", "SCHEMA_VERSION: Final = 2"),
    ("records.py", r"TS1\\x00", r"TS2\\x00"),
    ("fleet_v1.lua", r"TS1\\0", r"TS2\\0"),
    # A wider header of the counters, so that either reads the other's records askew.
    ("records.py", r'"spare", "<u4", 3', '"spare", "<u4", 7'),
    ("records.py", r"== \(32, 64\)", "== (48, 64)"),
    ("fleet_v1.lua", r"string.rep\('\\0', 12\)", r"string.rep('\\0', 28)"),
    ("*.lua", r"(local HEADER, .*=) 32,", r"\1 48,"),
)
"""Files of the contract, what is in them, and what is in them one schema version later."""


def second_version(folder: Path) -> Path:
    """The packages as they would be with another schema version and another layout."""
    for package in ("router", "indexer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for files, before, after in SECOND_VERSION:
        changed = 0
        for path in (folder / "indexer" / "contract").glob(files):
            text, count = re.subn(before, after, path.read_text())
            path.write_text(text)
            changed += count
        assert changed, f"{before} is not in {files} any more: say here what is"
    return folder


@dataclass
class Program:
    """A process and what it has logged."""

    name: str
    child: asyncio.subprocess.Process
    lines: list[dict[str, Any]] = field(default_factory=list)

    async def read(self) -> None:
        """Collect log lines until the process ends."""
        assert self.child.stdout is not None
        while line := await self.child.stdout.readline():
            self.lines.append(json.loads(line))

    def port(self) -> int | None:
        """Where it listens, once it does."""
        listening = (line["port"] for line in self.lines if line["event"] == "listening")
        return next(listening, None)

    def complaints(self) -> list[dict[str, Any]]:
        """Lines that an operator would have to look at."""
        return [line for line in self.lines if line["level"] not in ("debug", "info")]


class Version:
    """One router, and a sidecar of each engine, of one schema version.

    Args:
        folder: that holds its packages.
        where: Redis's URL.
        client: for HTTP.
    """

    def __init__(self, folder: Path, where: str, client: aiohttp.ClientSession) -> None:
        self.folder, self.where, self.client = folder, where, client
        self.router: Program
        self.sidecars: list[Program] = []

    @asynccontextmanager
    async def running(self, engines: list[Live]) -> AsyncIterator["Version"]:
        """All its processes; killed at the end where they still run."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            programs: dict[str, tuple[str, ...]] = {
                f"sidecar {i}": ("indexer", f"--engine_url={url_of(engine)}", "--metrics_port=0")
                for i, engine in enumerate(engines)
            }
            programs["router"] = (
                "router",
                "--port=0",
                "--index_deadline_s=5",
                "--drain_notice_s=0",
            )
            for name, (package, *options) in programs.items():
                child = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", package, f"--redis_url={self.where}", *options),
                    cwd=self.folder,
                    stdout=asyncio.subprocess.PIPE,
                )
                program = Program(name, child)
                tasks.create_task(program.read())
                stack.push_async_callback(child.wait)
                stack.callback(kill, child)
                self.sidecars.append(program)
            self.router = self.sidecars.pop()
            await until(self.router.port, f"the router of {self.folder} listens", DEADLINE_S)
            await until(self.serves_all, "every engine has joined", DEADLINE_S)
            yield self
            for program in self.programs():
                kill(program.child)

    def programs(self) -> list[Program]:
        """All of it."""
        return [*self.sidecars, self.router]

    def url(self, path: str) -> str:
        """Of its router."""
        return f"http://127.0.0.1:{self.router.port()}{path}"

    async def instances(self) -> list[dict[str, Any]]:
        """As its router shows them; [] when it knows no fleet."""
        async with self.client.get(self.url("/fleet")) as answer:
            fleets = (await answer.json())["fleets"]
        assert len(fleets) <= 1, "it sees the fleet of the other version"
        return list(fleets[0]["instances"]) if fleets else []

    async def serves_all(self) -> bool:
        """Whether a request could go to every engine."""
        return [i["eligible"] for i in await self.instances()] == [True] * ENGINES

    async def counted(self, name: str) -> int:
        """Sum of a counter over its instances."""
        return sum(instance[name] for instance in await self.instances())

    async def complete(self, prompt: list[int], max_tokens: int = 4) -> int:
        """Ask for an answer; cached tokens as the engine tells them."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens}
        async with self.client.post(self.url("/v1/completions"), json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    async def predicted(self, prompt: list[int]) -> int:
        """Hit tokens of the instance that its router would choose."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 4}
        async with self.client.post(self.url("/route"), json=body) as answer:
            return int((await answer.json())["hit_tokens"])

    async def metric(self, name: str, label: str = "") -> Counter[str]:
        """A counter of its router by one of its labels."""
        async with self.client.get(self.url("/metrics")) as answer:
            text = await answer.text()
        found = re.findall(
            rf"^timestable_router_{name}_total(?:{{(.*)}})? (\S+)$", text, re.MULTILINE
        )
        sums: Counter[str] = Counter()
        for labels, value in found:
            sums[dict(re.findall(r'(\w+)="(.*?)"', labels)).get(label, "")] += int(float(value))
        return +sums

    async def check_books(self) -> None:
        """Its own audit finds the books balanced."""
        options = ("inspect", f"--redis_url={self.where}", "--check=true")
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "indexer", *options),
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(DEADLINE_S):
            said, _ = await child.communicate()
        assert child.returncode == 0, said.decode()


def kill(child: asyncio.subprocess.Process) -> None:
    """End a process at once, if it still runs."""
    if child.returncode is None:
        child.kill()


def url_of(engine: Live) -> str:
    """Where it listens."""
    return str(engine.http._base_url).rstrip("/")


def prompts_of(first: int) -> list[list[int]]:
    """Prompts that differ from their first token on, so that they share no block."""
    return [list(range(start, start + PROMPT_TOKENS)) for start in range(first, first + PROMPTS)]


@asynccontextmanager
async def side_by_side(folder: Path, where: str) -> AsyncIterator[tuple[Version, Version]]:
    """Both versions on the same engines and the same Redis."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        engines = [
            await stack.enter_async_context(
                simulated(deadline_s=80.0, model_name="m", speedup=1.0, block_size_tokens=BLOCK)
            )
            for _ in range(ENGINES)
        ]
        versions = Version(ROOT, where, client), Version(second_version(folder), where, client)
        one, two = (v.running(engines) for v in versions)
        async with AsyncExitStack() as running:
            await asyncio.gather(*(running.enter_async_context(v) for v in (one, two)))
            yield versions


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
async def test_versions_do_not_disturb_each_other(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    """Either serves, predicts exactly, balances its books and sees the other's load as foreign.

    The older one's end, orderly or not, in the middle of a request, changes nothing for the newer.
    """
    async with side_by_side(tmp_path, f"unix://{redis_socket}") as versions:
        old, new = versions
        asked = {old: prompts_of(1_000), new: prompts_of(2_000)}
        cold = [v.complete(prompt) for v in versions for prompt in asked[v]]
        assert await asyncio.gather(*cold) == [0] * 2 * PROMPTS
        whole = PROMPT_TOKENS - 1
        for version in versions:  # what went through either is in the index of both
            for prompt in asked[old] + asked[new]:
                await until_equal(whole, lambda v=version, p=prompt: v.predicted(p))
        warm = [v.complete(p) for v, other in ((old, new), (new, old)) for p in asked[other]]
        assert await asyncio.gather(*warm) == [whole] * 2 * PROMPTS
        for version in versions:
            assert await version.metric("predictions", "result") == {"exact": 2 * PROMPTS}

        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(hold(old, list(range(3_000, 3_100))))
            await until_equal(1, lambda: old.counted("reserved_requests"))
            await until_equal(1, lambda: new.counted("foreign_requests"))
            # What ended just before is foreign to the other until its engine's next report.
            await until_equal(0, lambda: old.counted("foreign_requests"))
            assert await new.counted("reserved_requests") == 0
            names = {key[:4] for key in await redis_client.keys("*")}
            assert names == {b"ts1:", b"ts2:"}
            for version in versions:
                await version.check_books()
            if ending == signal.SIGTERM:
                held.cancel()
                await until_equal(0, lambda: old.counted("reserved_requests"))
                await old.check_books()
            for program in old.programs():
                program.child.send_signal(ending)
            while any(program.child.returncode is None for program in old.programs()):
                assert await new.complete(asked[new][0]) == whole
        assert ending != signal.SIGTERM or not any(p.child.returncode for p in old.programs())

        await until_equal(0, lambda: new.counted("foreign_requests"))
        await until_equal(0, lambda: new.counted("reserved_requests"))
        assert await new.serves_all()
        assert await asyncio.gather(*(new.complete(p) for p in asked[old])) == [whole] * PROMPTS
        await new.check_books()
        assert set(await new.metric("predictions", "result")) == {"exact"}
        assert not await new.metric("degraded") + await new.metric("index_errors")
        assert not await new.metric("ledger_errors") + await new.metric("internal_errors")
        complaints = {p.name: p.complaints() for v in versions for p in v.programs()}
        assert not any(complaints.values()), complaints


async def hold(version: Version, prompt: list[int]) -> None:
    """A request that would take long; how it ends is not the question."""
    with suppress(aiohttp.ClientError):
        await version.complete(prompt, max_tokens=4000)
