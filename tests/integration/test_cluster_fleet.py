"""Two routers, three engines with their sidecars, and a cluster of three shards, end to end."""

import importlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import pytest
import sidecar_run
import simulated_engine
from redis.crc import key_slot
from redis_servers import RedisCluster
from waiting import until, until_equal

from indexer.contract import fleet_functions, index_functions, keys
from indexer.contract.link import connected
from router.composition import Process, composed
from router.config import RouterConfig

pytestmark = pytest.mark.integration

PARTITIONS = 4
ENGINES = 3
FLEET = keys.fleet_id("sim")
RECOVERY_S = 20.0


@dataclass(frozen=True)
class Engine:
    """Where a simulated engine is."""

    url: str


@dataclass(frozen=True)
class Served:
    """One answered request: who served it, what was predicted and what was so."""

    url: str
    predicted_tokens: int
    actual_tokens: int
    degraded: bool


@dataclass(frozen=True)
class Fleet:
    """The engines' URLs, and a client of each router."""

    urls: list[str]
    clients: list[aiohttp.ClientSession]


async def ask(client: aiohttp.ClientSession, prompt: list[int]) -> Served:
    """A completion that must succeed."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
    headers = {"x-timestable-explain": "1"}
    async with client.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
    decision = json.loads(answer.headers["x-timestable-decision"])
    return Served(
        decision["url"],
        decision["hit_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        decision["degraded"],
    )


@asynccontextmanager
async def fleet(cluster: RedisCluster, **router: Any) -> AsyncIterator[Fleet]:
    """The whole fleet; yields a client of each router once all instances are known to both."""
    # Two routers in one process must not import it at the same time, each in a thread of its own.
    importlib.import_module("transformers").AutoTokenizer  # noqa: B018
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for _ in range(ENGINES):
            live = await stack.enter_async_context(simulated_engine.running())
            urls.append(str(live.http._base_url).rstrip("/"))
            sidecar = sidecar_run.running(Engine(urls[-1]), cluster.url, partitions=PARTITIONS)
            await stack.enter_async_context(sidecar)
        clients: list[aiohttp.ClientSession] = []
        for options in ({}, router):
            config = RouterConfig(
                redis_url=cluster.url,
                port=0,
                index_deadline_s=1.0,
                tokenize_deadline_s=20,
                **options,
            )
            process = await stack.enter_async_context(composed(config))
            await until_equal(ENGINES, partial(instances, process))
            url = f"http://127.0.0.1:{process.listeners.port}"
            clients.append(await stack.enter_async_context(aiohttp.ClientSession(url)))
        yield Fleet(urls, clients)


def instances(process: Process) -> int:
    """How many a router knows."""
    served = process.index.models().get("sim")
    return len(served.instances) if served else 0


async def test_routers_predict_hits_over_a_cluster(cluster: RedisCluster) -> None:
    """Each instance has a partition of its own; routers see in all of them what engines have."""
    prompts = np.random.default_rng(7).integers(0, 900, (2 * ENGINES, 320)).tolist()
    async with fleet(cluster, read_replicas=True) as running, connected(cluster.url) as link:
        for url, prompt in zip(running.urls * 2, prompts, strict=True):
            body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
            async with running.clients[0].post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
        record = await fleet_functions.read_fleet(link, FLEET)
        assert record is not None
        anchors = [index_functions.anchor(record, partition) for partition in range(PARTITIONS)]
        opened = await link.execute([("HLEN", anchor) for anchor in anchors])
        assert opened == [1, 1, 1, 0]
        for client in running.clients:
            for url, prompt in zip(running.urls * 2, prompts, strict=True):

                async def is_found(client=client, prompt=prompt, url=url) -> bool:
                    return await ask(client, prompt) == Served(url, 304, 304, False)

                await until(is_found, "the prefix is found where it is")


async def test_a_fleet_goes_on_when_a_shard_fails_over(cluster: RedisCluster) -> None:
    """The shard of the counters: routers decide without it, none fails, exact again after."""
    prompt = list(range(320))
    async with fleet(cluster) as running:
        clients = running.clients

        async def is_exact() -> bool:
            served = [await ask(client, prompt) for client in clients]
            return [(one.predicted_tokens, one.actual_tokens, one.degraded) for one in served] == [
                (304, 304, False)
            ] * 2

        await until(is_exact, "both routers find the prefix")
        shard = key_slot(keys.counters(FLEET).encode()) * 3 // 16384
        master, replica = (await cluster.shards())[shard]
        master.kill()

        async def is_noticed() -> bool:
            return all([(await ask(client, prompt)).degraded for client in clients])

        await until(is_noticed, "both routers decide alone")

        await until(is_exact, "exact again", RECOVERY_S)
        assert (await cluster.shards())[shard][0] is replica
