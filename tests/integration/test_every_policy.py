"""Every policy routes over real sockets: simulated engines, sidecars, one router, Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from sidecar_run import Probe
from sidecar_run import running as sidecar
from simulated_engine import running as simulated
from waiting import until_equal

from router.composition import composed
from router.config import RouterConfig
from router.policies import POLICIES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

DEADLINE_S = 100.0
ENGINES = 3
COUNTERS = ("reserved_requests", "reserved_prefill_tokens", "foreign_requests")


@dataclass(frozen=True, slots=True)
class Address:
    """What a sidecar needs of an engine."""

    url: str


@pytest.fixture
async def client(redis_socket: Path, probe: Probe) -> AsyncIterator[aiohttp.ClientSession]:
    """Of a router that lets requests choose their policy, with three engines."""
    del probe  # it begins with an empty Redis
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0, allow_policy_override=True)
    async with AsyncExitStack() as stack:
        for _ in range(ENGINES):
            engine = await stack.enter_async_context(
                simulated(model_name="m", deadline_s=DEADLINE_S)
            )
            url = str(engine.http._base_url).rstrip("/")
            await stack.enter_async_context(sidecar(Address(url), redis_socket))
        router = await stack.enter_async_context(composed(config))
        url = f"http://127.0.0.1:{router.listeners.port}"
        client = await stack.enter_async_context(aiohttp.ClientSession(url))

        async def eligible() -> int:
            async with client.get("/fleet") as answer:
                fleets = (await answer.json())["fleets"]
            return sum(one["eligible"] for fleet in fleets for one in fleet["instances"])

        await until_equal(ENGINES, eligible)
        yield client


async def ask(client: aiohttp.ClientSession, policy: str, number: int, *, stream: bool) -> None:
    """A request by this policy; half of its prompt is shared by all."""
    body = {
        "model": "m",
        "prompt": [7] * 160 + [1000 + number] * 160,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": stream,
    }
    headers = {"x-timestable-policy": policy, "x-session-id": f"s{number % 3}"}
    async with client.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, (policy, await answer.text())
        await answer.read()
    async with client.post("/route", json=body, headers=headers) as answer:
        assert (await answer.json())["policy"] == policy


async def test_every_policy_routes_and_the_books_end_at_zero(
    client: aiohttp.ClientSession, probe: Probe
) -> None:
    """Alone and many at once, streams and plain answers; nothing stays reserved of any of them."""
    for name in sorted(POLICIES):
        await ask(client, name, 0, stream=True)

    async with asyncio.TaskGroup() as tasks:
        for number in range(2):
            for name in POLICIES:
                tasks.create_task(ask(client, name, number, stream=number % 2 == 0))

    async def counters() -> dict[str, int]:
        now = await probe.counters()
        assert now is not None
        return {name: int(now.slots[name].sum()) for name in COUNTERS}

    await until_equal(dict.fromkeys(COUNTERS, 0), counters)
    async with client.get("/metrics") as answer:
        told = await answer.text()
    for name in POLICIES:
        routed = f'policy="{name}"'
        assert any(routed in line and "requests_total" in line for line in told.splitlines()), name
