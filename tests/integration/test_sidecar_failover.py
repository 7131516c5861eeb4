"""Another Redis answers than before, with old data or without: the index is right again."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cache_truth import Cache, prompt
from engine_stand_in import EngineStandIn
from prometheus_client import CollectorRegistry
from redis_servers import RedisServer, redis_server
from sidecar_run import Probe, running
from waiting import until, until_equal

pytestmark = pytest.mark.integration

CHAT, OTHER, THIRD = prompt(1, 6), prompt(2, 4), prompt(3, 3)


@asynccontextmanager
async def probing(server: RedisServer) -> AsyncIterator[Probe]:
    """What a router would see on this server."""
    async with server.client() as client:
        yield Probe(client)


def republishes(metrics: CollectorRegistry) -> dict[str, float]:
    """Whole tables published again, by cause."""
    return {
        sample.labels["cause"]: sample.value
        for family in metrics.collect()
        for sample in family.samples
        if sample.name == "timestable_indexer_republishes_total"
    }


async def change(cache: Cache) -> None:
    """What the old copy does not know: blocks are gone, others have come."""
    await cache.evict(OTHER, keep=1)
    await cache.evict(CHAT, keep=2)
    await cache.serve(THIRD)


async def until_freed(probe: Probe) -> None:
    """Of the slots used so far only the one in use remains."""
    await until(lambda: has_one_slot(probe), "the old slot is swept and freed")


async def has_one_slot(probe: Probe) -> bool:
    """Whether every other one is free."""
    return len(await probe.slots()) == 1


@pytest.mark.parametrize("kind", ["rdb", "aof"])
async def test_redis_restarted_with_old_data(tmp_path: Path, kind: str) -> None:
    """Its copy claims blocks that were evicted since: a new slot, the whole table, no old claim."""
    engine = EngineStandIn()
    options = ["--appendonly", "yes", "--appendfsync", "always"] if kind == "aof" else []
    with redis_server(tmp_path / "data", *options) as server:
        await until(server.answers, "the server answers")
        async with engine, running(engine, server.url) as metrics:
            cache = Cache(engine.publishers[0])
            async with probing(server) as probe:
                for tokens in (CHAT, OTHER):
                    await cache.serve(tokens)
                await cache.until_exact(probe)
                if kind == "rdb":
                    await server.ask("SAVE")
                shutil.copytree(server.folder, tmp_path / "old")
                await change(cache)
                await cache.until_exact(probe)
            server.kill()
            shutil.rmtree(server.folder)
            shutil.copytree(tmp_path / "old", server.folder)
            server.start()
            await until(server.answers, "the server answers again")
            async with probing(server) as probe:
                await cache.until_exact(probe)
                assert republishes(metrics) == {"server": 1}
                await until_freed(probe)
                await cache.until_exact(probe)


@pytest.mark.parametrize("lag", ["evictions", "everything"])
async def test_failover_to_a_replica_that_lags(tmp_path: Path, lag: str) -> None:
    """Replication is asynchronous: the new master lacks the last writes, or even our slot."""
    engine = EngineStandIn()
    at_once = ("--repl-diskless-sync-delay", "0")
    with (
        redis_server(tmp_path / "a", *at_once) as first,
        redis_server(tmp_path / "b", *at_once) as second,
    ):
        for server in (first, second):
            await until(server.answers, "a server answers")
        await second.ask("REPLICAOF", "127.0.0.1", str(first.port))
        await until(lambda: follows(second), "the replica has caught up")
        if lag == "everything":
            await second.ask("REPLICAOF", "NO", "ONE")
        url = f"{first.url},127.0.0.1:{second.port}"
        async with engine, running(engine, url) as metrics:
            cache = Cache(engine.publishers[0])
            for tokens in (CHAT, OTHER):
                await cache.serve(tokens)
            async with probing(first) as probe:
                await cache.until_exact(probe)
            if lag == "evictions":
                async with probing(second) as probe:
                    await cache.until_exact(probe)
                await second.ask("REPLICAOF", "NO", "ONE")
            await change(cache)
            async with probing(first) as probe:
                await cache.until_exact(probe)
            first.kill()
            async with probing(second) as probe:
                await cache.until_exact(probe)
                await until_freed(probe)
                await cache.evict(THIRD, keep=1)
                await cache.until_exact(probe)
            cause = "server" if lag == "evictions" else "lease"
            await until_equal({cause: 1.0}, lambda: republishes(metrics))


async def follows(server: RedisServer) -> bool:
    """Whether a replica has everything its master has."""
    replication = await server.info("replication")
    return replication.get("master_link_status") == "up"
