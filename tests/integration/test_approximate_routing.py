"""Requests without token ids, and engines without events: later turns go where the first went."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from builders import make_fleet_record
from engine_stand_in import EngineStandIn
from prometheus_client import REGISTRY, CollectorRegistry
from sidecar_run import FLEET, Probe, metric, running
from simulated_engine import Live
from simulated_engine import running as simulated
from waiting import until, until_equal

from indexer.approximate.engine_list import FileList
from indexer.approximate.engines import Drains, Engines
from indexer.config import SidecarConfig
from indexer.contract import fleet_functions, functions, keys, reservations
from indexer.contract.link import connected
from router.composition import composed
from router.config import RouterConfig

pytestmark = pytest.mark.integration


@asynccontextmanager
async def router(redis_socket: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A whole router, and a client of it."""
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0, index_deadline_s=2.0)
    async with (
        composed(config) as process,
        aiohttp.ClientSession(f"http://127.0.0.1:{process.listeners.port}") as client,
    ):
        await until(process.ledger.settled, "settled")
        yield client


async def usable(client: aiohttp.ClientSession, count: int) -> bool:
    """Whether the router sees so many instances that may be chosen."""
    async with client.get("/fleet") as answer:
        fleets = (await answer.json())["fleets"]
    return (
        sum(one.get("eligible", False) for fleet in fleets for one in fleet["instances"]) == count
    )


async def explained(client: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    """Where a request would go, and why."""
    async with client.post("/route", json=body) as answer:
        assert answer.status == 200, await answer.text()
        view: dict[str, Any] = await answer.json()
    return view


async def books_are_empty(client: redis.asyncio.Redis, fleet: Any) -> bool:
    """Whether nothing is reserved."""
    counters = reservations.fleet_counters(await functions.run(client, reservations.read(fleet)))
    assert counters is not None
    slots = counters.slots
    return not slots["reserved_requests"].any() and not slots["reserved_prefill_tokens"].any()


def counted(name: str, **labels: str) -> float:
    """A metric of the router."""
    return REGISTRY.get_sample_value(f"timestable_router_{name}", labels) or 0.0


# -- pictures -------------------------------------------------------------------------------------


def album(number: int) -> list[dict[str, Any]]:
    """A first turn with a picture of its own."""
    url = f"data:image/png;base64,{number:04d}" + "A" * 4000
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    return [{"role": "user", "content": parts}]


def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """A plain chat request."""
    return {"model": "m", "messages": messages}


async def test_a_picture_chat_comes_back_to_where_it_was(
    redis_client: redis.asyncio.Redis, redis_socket: Path, probe: Probe
) -> None:
    """Both engines tell events; the text chain is learned beside them, and counted apart."""
    engines = EngineStandIn(), EngineStandIn()
    compared = counted("predictions_total", fleet="m", result="exact")
    by_text = counted("approximate_total", by="text")
    async with AsyncExitStack() as stack:
        sidecars = []
        for engine in engines:
            await stack.enter_async_context(engine)
            sidecars.append(await stack.enter_async_context(running(engine, redis_socket)))
        client = await stack.enter_async_context(router(redis_socket))
        await until(lambda: usable(client, 2), "two instances")
        for number in range(6):
            first = album(number)
            async with client.post("/v1/chat/completions", json=chat(first)) as answer:
                assert answer.status == 200, await answer.text()
            (home,) = [one for one in engines if str(number).encode() in served_last(one, number)]
            answered = {"role": "assistant", "content": "A cat."}
            second = [*first, answered, {"role": "user", "content": "Sure?"}]

            async def known(second: list[dict[str, Any]] = second) -> bool:
                return (await explained(client, chat(second)))["hit_tokens"] > 0

            await until(known, "the index knows the first turn")
            view = await explained(client, chat(second))
            assert (view["url"], view["approximate"]) == (home.url, True)
            assert view["hit_tokens"] > view["new_prefill_tokens"]
            before = len(home.asked)
            async with client.post("/v1/chat/completions", json=chat(second)) as answer:
                assert answer.status == 200
            assert len(home.asked) == before + 1
        assert counted("approximate_total", by="text") == by_text + 12
        assert counted("predictions_total", fleet="m", result="exact") == compared
        await until(lambda: books_are_empty(redis_client, FLEET), "empty books")
        assert sum(metric(one, "notices_total") for one in sidecars) == 0


def served_last(engine: EngineStandIn, number: int) -> bytes:
    """The end of an engine's last request if that was this picture's, for its number."""
    mark = f"base64,{number:04d}".encode()
    return str(number).encode() if engine.asked and mark in engine.asked[-1] else b""


PAGES = " ".join(f"word{number}" for number in range(2000))
"""Long enough for several blocks of text."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": PAGES, "documents": ["a", "b"]}),
        ("/score", {"text_1": PAGES, "text_2": "b"}),
        ("/generative_scoring", {"query": PAGES, "items": ["b"], "label_token_ids": [1, 2]}),
        ("/cohere/v2/chat", {"messages": [{"role": "user", "content": PAGES}], "documents": ["d"]}),
        ("/classify", {"input": PAGES}),
        ("/pooling", {"input": PAGES}),
        ("/v2/embed", {"texts": [PAGES], "input_type": "query"}),
    ],
)
async def test_what_an_engine_has_read_comes_back_to_it(
    redis_socket: Path, probe: Probe, path: str, body: dict[str, Any]
) -> None:
    """Prompts that the engine alone puts together, or whose tokenizer is not to be had here."""
    engines = EngineStandIn(), EngineStandIn()
    body = {"model": "m"} | body
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
            await stack.enter_async_context(running(engine, redis_socket))
        client = await stack.enter_async_context(router(redis_socket))
        await until(lambda: usable(client, 2), "two instances")

        async def asked() -> tuple[str, dict[str, Any]]:
            explain = {"x-timestable-explain": "1"}
            async with client.post(path, json=body, headers=explain) as answer:
                view = json.loads(answer.headers["x-timestable-decision"])
            return view["url"], view

        home, _ = await asked()

        async def known() -> bool:
            url, view = await asked()
            return url == home and bool(view["approximate"]) and view["hit_tokens"] > 500

        await until(known, "the same instance, for what it has read")


# -- engines without events -----------------------------------------------------------------------

SIM_FLEET = keys.fleet_id("sim")


def tokens(seed: int, length: int) -> list[int]:
    """A prompt that no other seed's begins like."""
    return [100 + (seed * 89 + i * 31) % 400 for i in range(length)]


async def complete(client: aiohttp.ClientSession, prompt: list[int]) -> int:
    """A completion; the tokens that its engine found in its KV$."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
    async with client.post("/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@asynccontextmanager
async def listed(
    engines: list[Live], redis_socket: Path, tmp_path: Path
) -> AsyncIterator[CollectorRegistry]:
    """One process's sidecar of all of them."""
    path = tmp_path / "engines"
    path.write_text("".join(f"{one.http._base_url}\n" for one in engines))
    config = SidecarConfig(redis_url=f"unix://{redis_socket}", metrics_port=0)
    registry = CollectorRegistry()
    async with connected(config.redis_url) as link, asyncio.TaskGroup() as tasks:
        many = Engines(config, FileList(path), link, registry=registry, drains=Drains())
        task = tasks.create_task(many.run())
        try:
            yield registry
        finally:
            task.cancel()
            await asyncio.wait([task])


TURNS_MAX = 20


async def test_a_fleet_without_events_is_routed_by_what_was_computed(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path
) -> None:
    """What one router has sent, another one finds; hits are what the engines report."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(simulated(model_name="sim", event_endpoint=None))
            for _ in range(2)
        ]
        await stack.enter_async_context(listed(engines, redis_socket, tmp_path))
        one = await stack.enter_async_context(router(redis_socket))
        other = await stack.enter_async_context(router(redis_socket))
        await until(lambda: usable(one, 2), "two instances")
        await until(lambda: usable(other, 2), "two instances")
        homes: set[str] = set()
        for seed in range(TURNS_MAX):
            prompt = tokens(seed, 200)
            assert await complete(one, prompt) == 0
            turn = {"model": "sim", "prompt": prompt + tokens(50 + seed, 40)}

            async def known(turn: dict[str, Any] = turn) -> bool:
                return (await explained(other, turn))["hit_tokens"] == 192

            await until(known, "the index knows the first turn")
            view = await explained(other, turn)
            homes.add(view["url"])
            assert view["approximate"] is True
            assert await complete(other, json.loads(json.dumps(turn["prompt"]))) == 192
            if len(homes) == len(engines):  # idle engines are drawn by lot
                break
        assert len(homes) == len(engines)
        await until(lambda: books_are_empty(redis_client, SIM_FLEET), "empty books")


async def test_what_an_engine_has_dropped_is_not_promised(
    redis_client: redis.asyncio.Redis, redis_socket: Path, tmp_path: Path
) -> None:
    """Of a small KV$ the prompt used longest ago goes, in the index as in the engine."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            simulated(model_name="sim", event_endpoint=None, capacity_blocks=64)
        )
        await stack.enter_async_context(listed([engine], redis_socket, tmp_path))
        client = await stack.enter_async_context(router(redis_socket))
        await until(lambda: usable(client, 1), "an instance")
        for seed in range(6):
            await complete(client, tokens(seed, 320))
        await until_equal(320 - 16, lambda: hit(client, tokens(5, 320)))
        await until_equal(0, lambda: hit(client, tokens(0, 320)))
        assert await complete(client, tokens(0, 320)) == 0


async def hit(client: aiohttp.ClientSession, prompt: list[int]) -> int:
    """Predicted for a prompt."""
    view = await explained(client, {"model": "sim", "prompt": prompt})
    return int(view["hit_tokens"])


# -- devices that differ --------------------------------------------------------------------------


async def test_tokens_count_by_how_long_they_take(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Measured at their start: a busy fast one is still sooner done than an idle slow one."""
    async with AsyncExitStack() as stack:
        fast, slow = [
            await stack.enter_async_context(simulated(model_name="sim", speedup=speedup))
            for speedup in (10.0, 2.0)
        ]
        for engine in (fast, slow):
            url = str(engine.http._base_url)
            await stack.enter_async_context(running(_At(url), redis_socket, measure_prefill=True))
        client = await stack.enter_async_context(router(redis_socket))
        await until(lambda: usable(client, 2), "two instances")
        async with client.get("/fleet") as answer:
            ((one, other),) = [
                [instance["prefill_tokens_per_s"] for instance in fleet["instances"]]
                for fleet in (await answer.json())["fleets"]
            ]
        assert max(one, other) > 2 * min(one, other)
        view = await explained(client, {"model": "sim", "prompt": tokens(1, 400)})
        assert view["url"] == _url(fast)
        assert view["candidates"][0]["score"] == 400.0
        assert view["candidates"][1]["score"] > 2 * 400.0

        running_on_it = {"model": "sim", "prompt": tokens(2, 400), "max_tokens": 900}
        async with client.post("/v1/completions", json=running_on_it | {"stream": True}) as first:
            await first.content.readany()
            later = {"model": "sim", "prompt": tokens(3, 400), "max_tokens": 1}
            async with client.post("/v1/completions", json=later) as second:
                await second.read()
        instances = [one.headers["x-timestable-instance"] for one in (first, second)]
        port = _url(fast).rpartition(":")[2]
        assert [f":{port}/" in instance for instance in instances] == [True, True]


async def test_a_device_is_measured_once(
    redis_client: redis.asyncio.Redis, redis_socket: Path, probe: Probe
) -> None:
    """A fleet founded anew, with other blocks, has the same engines, which are busy by then."""
    fleet = make_fleet_record(block_size_tokens=32)
    async with (
        simulated(model_name="m") as engine,
        running(_At(_url(engine)), redis_socket, measure_prefill=True) as metrics,
    ):
        await until(probe.slots, "a slot")
        (before,) = await probe.instances()
        assert before.prefill_tokens_per_s is not None

        async def has_joined_anew() -> bool:
            if metric(metrics, "restarts_total"):
                return bool(await probe.slots())
            await redis_client.flushall()
            await functions.run(redis_client, fleet_functions.create(fleet))
            return False

        await until(has_joined_anew, "the sidecar has joined the other fleet")
        (after,) = await probe.instances()
        assert after.instance_id != before.instance_id
        assert after.prefill_tokens_per_s == before.prefill_tokens_per_s


class _At:
    """An engine by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url


def _url(engine: Live) -> str:
    return str(engine.http._base_url).rstrip("/")
