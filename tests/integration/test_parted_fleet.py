"""Prefill and decode apart: simulated engines, their sidecars, a router and Redis.

After every test the books are empty, of requests, of prefill tokens and of what engines hold.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sidecar_run import Probe
from sidecar_run import running as sidecar
from simulated_engine import Live
from simulated_engine import running as simulated
from waiting import until, until_equal

from router.composition import composed
from router.config import RouterConfig

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
PATH = "/v1/completions"
PROMPT = list(range(1000, 1000 + 320))
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "seed": 7}
COUNTERS = ("reserved_requests", "reserved_prefill_tokens", "foreign_requests")
SLOW: dict[str, Any] = {"kv_transfer_latency_s": 2500.0}
"""A transfer that takes longer than any test."""


SHORT: dict[str, Any] = {"kv_lease_duration_s": 3.0}
"""Where blocks stay held for somebody who will not come."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A router and its engines, by name: p and q prefill, d and e decode."""

    client: aiohttp.ClientSession
    engines: dict[str, Live]

    def name(self, instance_id: str) -> str:
        """Of the engine that an answer names."""
        address = instance_id.partition("/")[0]
        return next(name for name, one in self.engines.items() if one.url.endswith(address))

    async def ask(self, **changes: Any) -> tuple[str, str, bytes]:
        """Who prefilled, who decoded, and the answer to a request that must succeed."""
        async with self.client.post(PATH, json=BODY | changes) as answer:
            body = await answer.read()
            assert answer.status == 200, body
            prefilled = self.name(answer.headers["x-timestable-prefill-instance"])
            return prefilled, self.name(answer.headers["x-timestable-instance"]), body

    def taking(self) -> list[str]:
        """Engines to which KV$ is on its way."""
        return [n for n, one in self.engines.items() if one.runtime.metrics.taking_count()]

    def held(self) -> int:
        """Blocks that requests hold, at all engines that live."""
        living = [one for one in self.engines.values() if one.runner.sites]
        return sum(one.engine.pool.used_count for one in living)


@asynccontextmanager
async def fleet(
    redis_socket: Path,
    probe: Probe,
    names: str = "pqde",
    each: dict[str, dict[str, Any]] | None = None,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """Engines with sidecars, and a router that sees them all."""
    options = {"kv_connector": "nixl", "model_name": "m"} | options
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0)
    async with AsyncExitStack() as stack:
        engines = {}
        for name in names:
            own = options | (each or {}).get(name, {})
            engine = await stack.enter_async_context(simulated(deadline_s=DEADLINE_S, **own))
            role = "prefill" if name in "pq" else "decode"
            await stack.enter_async_context(sidecar(engine, redis_socket, role=role))
            engines[name] = engine
        router = await stack.enter_async_context(composed(config))
        url = f"http://127.0.0.1:{router.listeners.port}"
        client = await stack.enter_async_context(aiohttp.ClientSession(url))

        async def eligible() -> int:
            async with client.get("/fleet") as answer:
                fleets = (await answer.json())["fleets"]
            return sum(one["eligible"] for fleet in fleets for one in fleet["instances"])

        await until_equal(len(names), eligible)
        one = Fleet(client=client, engines=engines)
        yield one

        async def counters() -> dict[str, int]:
            now = await probe.counters()
            assert now is not None
            return {name: int(now.slots[name].sum()) for name in COUNTERS}

        await until_equal(dict.fromkeys(COUNTERS, 0), counters)
        await until_equal(0, one.held)


def events(stream: bytes) -> list[dict[str, Any]]:
    """Of a whole stream."""
    assert stream.endswith(b"data: [DONE]\n\n"), stream[-200:]
    return [json.loads(one.removeprefix(b"data: ")) for one in stream.split(b"\n\n")[:-2]]


def text_of(stream: bytes) -> str:
    """What a stream says."""
    return "".join(c["text"] for event in events(stream) for c in event["choices"])


async def test_streams_and_plain_answers_of_two_legs(redis_socket, probe: Probe) -> None:
    """The same text and usage as one engine gives; the next turn finds its prefix at the prefiller.

    And what a prefill instance holds after its legs is what the index says: predictions are exact.
    """
    async with fleet(redis_socket, probe) as one:
        alone = await one.engines["d"].post(PATH, **BODY, cache_salt="of another cache")
        usage = {"stream_options": {"include_usage": True}}
        prefilled, _, stream = await one.ask(stream=True, **usage)
        assert text_of(stream) == alone["choices"][0]["text"]
        assert events(stream)[-1]["usage"]["prompt_tokens"] == 320
        assert events(stream)[-1]["usage"]["completion_tokens"] == 8
        again, _, body = await one.ask()
        plain = json.loads(body)
        assert plain["choices"][0]["text"] == alone["choices"][0]["text"]
        assert (plain["usage"]["prompt_tokens"], plain["usage"]["completion_tokens"]) == (320, 8)
        longer = [*PROMPT, *range(500)]
        assert [prefilled] * 2 == [again, (await one.ask(prompt=longer))[0]]
        decoded = sum(one.engines[n].engine.totals.generated_tokens for n in "de")
        assert decoded == 4 * 8
        async with one.client.get("/decisions") as answer:
            decisions = (await answer.json())["decisions"]
        assert [d["attempts_count"] for d in decisions] == [2, 2, 2]
        assert [d["cached_tokens"] for d in decisions] == [320, 304, 0]


async def test_many_at_once_spread_over_both_pools(redis_socket, probe: Probe) -> None:
    """Prefills by the product, decodes by batch size; none twice, none lost."""
    async with fleet(redis_socket, probe) as one, asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(one.ask(prompt=[n, *PROMPT], stream=n % 2 == 0, max_tokens=32))
            for n in range(24)
        ]
        await asyncio.wait(asked)
        for place in (0, 1):
            shares = [[task.result()[place] for task in asked].count(n) for n in "pqde"]
            assert sum(shares) == 24
            assert sorted(shares)[2] >= 6, shares


async def test_a_prefiller_killed_in_its_leg(redis_socket, probe: Probe) -> None:
    """The other one prefills."""
    slow = {"speedup": 0.02}
    async with fleet(redis_socket, probe, "pqd", each={"p": slow}) as one:
        asking = [asyncio.ensure_future(one.ask(prompt=[n, *PROMPT])) for n in range(6)]
        await until(lambda: one.engines["p"].engine.running_count, "one is at p")
        await one.engines["p"].kill()
        answers = await asyncio.gather(*asking)
        assert {prefilled for prefilled, *_ in answers} == {"q"}


async def test_a_prefiller_killed_while_its_blocks_are_taken(redis_socket, probe: Probe) -> None:
    """The decoder says so, and everything begins anew at the other one."""
    slow = {"kv_transfer_latency_s": 60.0}
    async with fleet(redis_socket, probe, "pqd", each={"d": slow}) as one:
        asking = asyncio.ensure_future(one.ask(stream=True))
        await until(one.taking, "blocks are on their way")
        holder = next(n for n in "pq" if one.engines[n].engine.pool.used_count)
        await one.engines[holder].kill()
        prefilled, decoded, stream = await asking
        assert (prefilled, decoded) == ("q" if holder == "p" else "p", "d")
        assert len(text_of(stream).split()) == 8


async def test_a_decoder_killed_before_its_first_byte(redis_socket, probe: Probe) -> None:
    """The other one decodes what was prefilled anew; the client sees one good answer."""
    async with fleet(redis_socket, probe, each={"d": SLOW}, **SHORT) as one:
        asking = [
            asyncio.ensure_future(one.ask(prompt=[n, *PROMPT], stream=True)) for n in range(6)
        ]
        await until(lambda: "d" in one.taking(), "blocks are on their way to d")
        await one.engines["d"].kill()
        answers = await asyncio.gather(*asking)
        assert {decoded for _, decoded, _ in answers} == {"e"}
        assert {len(text_of(stream).split()) for *_, stream in answers} == {8}


@pytest.mark.parametrize("leg", ["prefill", "transfer", "decode"])
async def test_a_client_that_leaves(redis_socket, probe: Probe, leg: str) -> None:
    """In whichever leg: no engine works on, and nothing is booked or held."""
    each = {
        "prefill": {"p": {"speedup": 0.02}},
        "transfer": {"d": SLOW},
        "decode": {"d": {"speedup": 0.5}},
    }[leg]
    async with fleet(redis_socket, probe, "pd", each=each, **SHORT) as one:
        working = one.engines["p" if leg == "prefill" else "d"]
        asking = asyncio.ensure_future(one.ask(stream=True, max_tokens=1000))
        if leg == "transfer":
            await until(one.taking, "blocks are on their way")
        else:
            await until(lambda: working.engine.running_count, "the leg is running")
        asking.cancel()
        await until_equal(0, lambda: working.engine.running_count + len(one.taking()))
