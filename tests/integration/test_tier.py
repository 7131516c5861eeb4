"""A tier of KV$ that engines tell of in their events: from the socket to what a policy sees."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_stand_in import EngineStandIn, EventPublisher, removed, stored
from sidecar_run import PROMPT, Probe, chain_of, metric, running
from sidecar_run import running as sidecar
from simulated_engine import running as simulated
from waiting import until_equal

from indexer.contract.link import connected
from router.composition import composed
from router.config import RouterConfig
from router.eligibility import eligible_snapshot
from router.index.index_client import IndexClient
from router.snapshot import FleetSnapshot

pytestmark = pytest.mark.integration

TIER: dict[str, Any] = {
    "tier_media": ("CPU",),
    "tier_tokens_per_s": 32_000,
    "prefill_tokens_per_s": 1000,
}
"""What is loaded comes 32 times as fast as it is computed."""

BLOCKS = [1, 2, 3, 4]
WRITTEN = stored(BLOCKS, PROMPT, medium="CPU")
WRITTEN_WITHOUT_TOKENS = stored(
    BLOCKS, (), medium="CPU", block_size=0, extra_keys=None, group_idx=None, kv_cache_spec_kind=None
)
"""As vLLM's OffloadingConnector told it before it knew tokens."""


class Router:
    """What a router sees for a request with the prompt and a token more."""

    def __init__(self, index: IndexClient) -> None:
        self._index = index

    async def snapshot(self) -> FleetSnapshot | None:
        """None while no sidecar has joined."""
        await self._index.refresh()
        served = self._index.models().get("m")
        if served is None:
            return None
        sighting = await self._index.look(served, chain_of(PROMPT))
        return eligible_snapshot(sighting, len(PROMPT) + 1)

    async def loadable(self) -> list[tuple[int, int, int]]:
        """Hit, loadable and new prefill tokens of every instance."""
        seen = await self.snapshot()
        if seen is None:
            return []
        loadable = [0] * len(seen.instances) if seen.tier_tokens is None else seen.tier_tokens
        columns = (seen.hit_tokens, loadable, seen.new_prefill_tokens)
        return [(int(h), int(t), int(n)) for h, t, n in zip(*columns, strict=True)]


@asynccontextmanager
async def routing(where: Path) -> AsyncIterator[Router]:
    """A router's client of the index."""
    async with connected(f"unix://{where}", deadline_s=2.0) as link:
        yield Router(IndexClient(link, deadline_s=2.0))


@pytest.mark.parametrize("written", [WRITTEN, WRITTEN_WITHOUT_TOKENS])
async def test_what_an_engine_has_offloaded_counts_as_its_load(
    redis_socket: Path, probe: Probe, written: dict[str, object]
) -> None:
    """64 tokens that take as long to load as 2 to compute, when the device has dropped them."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket, **TIER), routing(redis_socket) as router:
        events = engine.publishers[0]
        await events.publish(stored(BLOCKS, PROMPT))
        await until_equal([4], probe.depths)
        await events.publish(written)
        await events.publish(removed(BLOCKS))
        await until_equal([(0, 64, 1 + 2)], router.loadable)
        await events.publish(stored(BLOCKS[:2], PROMPT[:32]))
        await until_equal([(32, 32, 1 + 1)], router.loadable)
        await events.publish({**removed(BLOCKS[2:]), "medium": "CPU"})
        await until_equal([(32, 0, 33)], router.loadable)
        seen = await router.snapshot()
        assert seen is not None
        assert seen.tier_tokens is None


async def test_a_shared_tier_is_everybodys_who_shares(redis_socket: Path, probe: Probe) -> None:
    """One writes, the other two can load: not the one with a tier of its own."""
    engines = [EngineStandIn() for _ in range(3)]
    shares = [True, True, False]
    async with engines[0], engines[1], engines[2], routing(redis_socket) as router:
        options = [TIER | {"tier_shared": shared} for shared in shares]
        async with (
            running(engines[0], redis_socket, **options[0]),
            running(engines[1], redis_socket, **options[1]),
            running(engines[2], redis_socket, **options[2]),
        ):
            await until_equal([0, 0, 0], probe.depths)
            await engines[0].publishers[0].publish(WRITTEN)

            async def by_sharing() -> list[tuple[bool, int]]:
                seen = await router.snapshot()
                assert seen is not None
                loadable = [0] * 3 if seen.tier_tokens is None else seen.tier_tokens.tolist()
                shared = [one.tier_shared for one in seen.instances]
                return sorted(zip(shared, loadable, strict=True))

            await until_equal([(False, 0), (True, 64), (True, 64)], by_sharing)


async def test_a_tier_that_nobody_configured_is_not_counted(
    redis_socket: Path, probe: Probe
) -> None:
    """Events of other media leave the index as it is, and routers ask it nothing more."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket), routing(redis_socket) as router:
        await engine.publishers[0].publish(WRITTEN, stored([9], range(16)))
        await until_equal([1], lambda: probe.depths(range(16)))
        assert await router.loadable() == [(0, 0, 65)]


async def test_a_tier_comes_back_after_a_flush_and_is_doubted_after_a_loss(
    redis_socket: Path, probe: Probe
) -> None:
    """Of Redis, whole; of the engine's history, only what it writes again, or behind it."""
    engine = EngineStandIn(publishers=[EventPublisher(ring_batches=1)])
    async with (
        engine,
        running(engine, redis_socket, **TIER) as metrics,
        routing(redis_socket) as router,
    ):
        events = engine.publishers[0]
        await events.publish(WRITTEN)
        await until_equal([(0, 64, 3)], router.loadable)
        await probe.redis.flushall()
        await until_equal([0], probe.depths)
        await until_equal([(0, 64, 3)], router.loadable)
        await events.publish(skip_live=True)
        await events.publish()
        await until_equal([(0, 0, 65)], router.loadable)
        await events.publish(stored([2], PROMPT[16:32], parent=1, medium="CPU"))
        await until_equal([(0, 32, 1 + 1 + 32)], router.loadable)
        assert metric(metrics, "gaps_total") == 1


@dataclass(frozen=True, slots=True)
class Address:
    """What a sidecar needs of an engine."""

    url: str


async def test_what_the_router_counts_on_the_engine_loads(redis_socket: Path, probe: Probe) -> None:
    """Router, sidecar and an engine whose device holds one prompt, its tier several.

    The second prompt pushes the first off the device; when that comes again, the router predicts
    the load, the engine does it, and what it then reports as cached proves the prediction right.
    """
    del probe  # it begins with an empty Redis
    config = RouterConfig(redis_url=f"unix://{redis_socket}", port=0)
    prompts = [[1000 * place + token for token in range(600)] for place in (1, 2)]
    async with (
        simulated(model_name="m", capacity_blocks=38, tier_capacity_blocks=500) as engine,
        sidecar(Address(engine.url), redis_socket, **TIER),
        composed(config) as router,
        aiohttp.ClientSession(f"http://127.0.0.1:{router.listeners.port}") as client,
    ):

        async def asked(path: str, prompt: list[int]) -> dict[str, Any]:
            body = {"model": "m", "prompt": prompt, "max_tokens": 2}
            async with client.post(path, json=body) as answer:
                return dict(await answer.json())

        async def counts() -> tuple[int, int]:
            decision = await asked("/route", prompts[0])
            return decision.get("hit_tokens", -1), decision.get("tier_tokens", -1)

        await until_equal((0, 0), counts)
        for prompt in prompts:
            await asked("/v1/completions", prompt)
        await until_equal((0, 592), counts)
        answer = await asked("/v1/completions", prompts[0])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 592
        assert engine.engine.totals.tier_hits_tokens == 592
        async with client.get("/fleet") as told:
            predictions = (await told.json())["fleets"][0]["predictions"]
        assert (predictions["compared"], predictions["exact_ratio"]) == (3, 1.0)
