"""Engines join and leave a fleet that works, and others use them: real sidecars and a real router.

The engines are simulated; each has its sidecar, and all run in this process.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from sidecar_run import Probe
from sidecar_run import running as sidecar
from simulated_engine import Live
from simulated_engine import running as simulated
from waiting import until, until_equal

from indexer.contract.records import SlotFlag
from router.composition import composed
from router.config import RouterConfig

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
DONE = "data: [DONE]\n\n"
FOREIGN = 5
SEEN_S = 1.0
MISTAKEN_S = 0.5
"""The longest that an own request may be taken for somebody else's."""


@dataclass(frozen=True, kw_only=True)
class Url:
    """Where an engine answers."""

    url: str


@dataclass
class Fleet:
    """A router and the engines that have joined.

    Attributes:
        client: of the router.
        engines: by URL.
        sidecars: what ends each engine's sidecar as SIGTERM would, by URL.
    """

    client: aiohttp.ClientSession
    probe: Probe
    redis_socket: Path
    stack: AsyncExitStack
    engines: dict[str, Live] = field(default_factory=dict)
    sidecars: dict[str, AsyncExitStack] = field(default_factory=dict)
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def join(self, **options: Any) -> str:
        """Start an engine and its sidecar; its URL once routers may choose it."""
        engine = await self.stack.enter_async_context(
            simulated(model_name="m", deadline_s=DEADLINE_S, **options)
        )
        url = str(engine.http._base_url).rstrip("/")
        self.engines[url] = engine
        await self.announce(url)
        return url

    async def announce(self, url: str) -> None:
        """Start the sidecar of a running engine."""
        own = self.sidecars[url] = AsyncExitStack()
        self.stack.push_async_exit(own.__aexit__)
        await own.enter_async_context(sidecar(Url(url=url), self.redis_socket))

        async def is_eligible() -> bool:
            view = await self.view()
            return any(one["eligible"] and one["url"] == url for one in view)

        await until(is_eligible, f"{url} is eligible")

    async def view(self) -> list[dict[str, Any]]:
        """The instances as the router shows them."""
        async with self.client.get("/fleet") as answer:
            fleets = (await answer.json())["fleets"]
        return [one for fleet in fleets for one in fleet["instances"]]

    async def batch_size(self, url: str) -> int:
        """Of one engine, as the router would decide by it now."""
        name = url.removeprefix("http://")
        async with self.client.post("/route", json=self.body(1)) as answer:
            candidates = (await answer.json())["candidates"]
        (size,) = (c["batch_size"] for c in candidates if c["instance_id"].startswith(name))
        return int(size)

    def body(self, tokens: int, shared: int = 0, own_tokens: int = 32) -> dict[str, Any]:
        """A streamed completion; a shared beginning of 256 tokens where its number is not 0."""
        number = next(self.numbers)
        prompt = [shared] * (256 if shared else 0) + [1000 + number % 9000] * own_tokens
        fixed = {"model": "m", "ignore_eos": True, "stream": True}
        return fixed | {"prompt": prompt, "max_tokens": tokens}

    async def ask(self, tokens: int = 1, **prompt: int) -> str:
        """A request that has to end whole; the URL of the engine that served it."""
        async with self.client.post("/v1/completions", json=self.body(tokens, **prompt)) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        assert text.endswith(DONE)
        return "http://" + answer.headers["x-timestable-instance"].partition("/")[0]

    async def hang_up(self, tokens: int) -> None:
        """A client that goes away after the first byte."""
        async with self.client.post("/v1/completions", json=self.body(tokens)) as answer:
            await answer.content.readany()
            answer.close()

    async def counters(self) -> dict[str, int]:
        """What is reserved and what is foreign, summed over all slots."""
        now = await self.probe.counters()
        assert now is not None
        names = ("reserved_requests", "reserved_prefill_tokens", "foreign_requests")
        return {name: int(now.slots[name].sum()) for name in names}

    async def until_zero(self) -> None:
        """Wait until every counter is zero."""
        names = ("reserved_requests", "reserved_prefill_tokens", "foreign_requests")
        await until_equal(dict.fromkeys(names, 0), self.counters)


@pytest.fixture
async def fleet(redis_socket: Path, probe: Probe) -> AsyncIterator[Fleet]:
    """A router without engines."""
    async with AsyncExitStack() as stack:
        config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0)
        process = await stack.enter_async_context(composed(config))
        url = f"http://127.0.0.1:{process.listeners.port}"
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        yield Fleet(client=client, probe=probe, redis_socket=redis_socket, stack=stack)


@asynccontextmanager
async def background(*works: Any) -> AsyncIterator[None]:
    """Work that goes on meanwhile; what fails in it fails the test."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        yield
        for task in running:
            task.cancel()


async def test_requests_from_elsewhere_count(fleet: Fleet) -> None:
    """Within a second routers see what an engine got past them, and avoid it until that ends."""
    busy, idle = [await fleet.join(speedup=1.0) for _ in range(2)]
    direct = fleet.engines[busy].http

    async def past_the_router() -> None:
        async with direct.post("/v1/completions", json=fleet.body(10_000)) as answer:
            await answer.read()

    sent_s = time.monotonic()
    async with background(*(past_the_router() for _ in range(FOREIGN))):

        async def all_seen() -> bool:
            return await fleet.batch_size(busy) >= FOREIGN

        await until(all_seen, "they are seen")
        assert time.monotonic() - sent_s <= SEEN_S
        assert await fleet.batch_size(idle) == 0
        assert {await fleet.ask() for _ in range(6)} == {idle}
    await fleet.until_zero()
    assert await fleet.batch_size(busy) == 0


async def test_own_requests_are_not_taken_for_foreign_ones(fleet: Fleet) -> None:
    """Whatever their end: at every moment, but for what one heartbeat may be late."""
    for _ in range(2):
        await fleet.join(speedup=5.0)
    spans_s, since_s, samples, ended = [0.0], None, 0, asyncio.Event()

    async def sample() -> None:
        nonlocal since_s, samples
        while not ended.is_set():
            foreign = (await fleet.counters())["foreign_requests"]
            samples += 1
            since_s = (since_s or time.monotonic()) if foreign else None
            spans_s.append(time.monotonic() - since_s if since_s else 0.0)
            await asyncio.sleep(0.005)

    async with asyncio.timeout(40), asyncio.TaskGroup() as sampling:
        sampling.create_task(sample())
        for _ in range(8):
            async with asyncio.TaskGroup() as tasks:
                for tokens in (1, 5, 40, 120):
                    tasks.create_task(fleet.ask(tokens))
                    tasks.create_task(fleet.hang_up(10 * tokens + 200))
        await fleet.until_zero()
        ended.set()
    assert samples > 25
    assert max(spans_s) <= MISTAKEN_S


async def test_an_orderly_leaving_loses_nothing(fleet: Fleet) -> None:
    """What runs at an engine ends whole, nothing new comes, counters are zero, the slot is free."""
    leaver = await fleet.join(speedup=2.0)
    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(fleet.ask(300)) for _ in range(4)]
        await until_equal(4, lambda: fleet.batch_size(leaver))
        other = await fleet.join(speedup=2.0)
        leaving = tasks.create_task(fleet.sidecars[leaver].aclose())
        # A request that comes while it leaves may still be booked there, before the slot closes.
        await until_equal({1: SlotFlag.USED}, fleet.probe.slots)
        assert {await fleet.ask() for _ in range(8)} == {other}
        await leaving
        assert not any(stream.done() for stream in streams)
    assert {stream.result() for stream in streams} == {leaver}
    await fleet.until_zero()
    await fleet.announce(leaver)
    await until_equal({0: SlotFlag.USED, 1: SlotFlag.USED}, fleet.probe.slots)
    now = await fleet.probe.counters()
    assert now is not None
    assert now.slots["generation"].tolist() == [2, 1]
    assert {await fleet.ask() for _ in range(8)} >= {leaver}


async def test_a_new_engine_takes_its_share(fleet: Fleet) -> None:
    """Its cold cache makes it neither a magnet nor a leper beside two busy, warm ones."""
    for _ in range(2):
        await fleet.join(speedup=4.0)
    rng = np.random.default_rng(20261130)
    served: list[tuple[float, str]] = []

    async def one() -> None:
        begun_s = time.monotonic()
        url = await fleet.ask(100, shared=int(rng.integers(1, 13)), own_tokens=128)
        served.append((begun_s, url))

    async def load() -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(one())
                await asyncio.sleep(float(rng.exponential(1 / 30)))

    async with background(load()):
        await until(lambda: len(served) >= 60, "the first two are warm and busy")
        newcomer = await fleet.join(speedup=4.0)
        joined_s = time.monotonic()
        await until(lambda: served[-1][0] >= joined_s + 5.0, "some seconds pass")
    shares = Counter(url for begun_s, url in served if begun_s >= joined_s + 1.0)
    fair = shares.total() / 3
    assert 0.5 * fair <= shares[newcomer] <= 2 * fair, shares
