"""`python -m indexer` as an operator starts it."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from cache_truth import Cache, prompt
from engine_stand_in import EngineStandIn, EventPublisher, stored
from sidecar_process import sidecar_process
from sidecar_run import Probe
from waiting import until, until_equal

from indexer.contract import functions, keys, reservations
from indexer.contract.identifiers import RouterId

pytestmark = pytest.mark.integration

FLEET = keys.fleet_id("m")


@asynccontextmanager
async def process(*args: str) -> AsyncIterator[Process]:
    """A process of the indexer, gone at the end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", *args, stdout=PIPE, stderr=PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def line_of(child: Process, event: str) -> dict[str, object]:
    """The first log line of an event."""
    assert child.stdout is not None
    async with asyncio.timeout(30):
        while line := await child.stdout.readline():
            entry: dict[str, object] = json.loads(line)
            if entry["event"] == event:
                return entry
    pytest.fail(f"no {event}: {(await child.communicate())[1].decode()}")


async def test_sigterm_leaves_gracefully(
    redis_socket: Path, redis_client: redis.asyncio.Redis
) -> None:
    """On SIGTERM the slot is swept and freed, and the exit status is 0."""
    engine = EngineStandIn()
    async with engine:
        await engine.publishers[0].publish(stored([1], range(16)))
        args = ["--engine_url", engine.url, "--redis_url", f"unix://{redis_socket}"]
        async with process(*args, "--metrics_port", "0") as child:
            await line_of(child, "events_subscribed")
            child.send_signal(signal.SIGTERM)
            await line_of(child, "slot_left")
            await line_of(child, "sidecar_stopped")
            assert await child.wait() == 0
    counters = reservations.fleet_counters(
        await functions.run(redis_client, reservations.read(FLEET))
    )
    assert counters is not None
    assert counters.slots["flags"].tolist() == [0]


async def test_waits_for_the_engine(redis_socket: Path) -> None:
    """An engine that is not up yet is waited for, and the log says so."""
    args = ["--engine_url", "http://127.0.0.1:9", "--redis_url", f"unix://{redis_socket}"]
    async with process(*args, "--metrics_port", "0") as child:
        entry = await line_of(child, "engine_awaited")
        assert "http://127.0.0.1:9/health" in str(entry["reason"])
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


async def test_unsuitable_engine_ends_with_a_reason(redis_socket: Path) -> None:
    """An engine without KV events ends the process: status 1 and what to change."""
    engine = EngineStandIn(tells_sources=False)
    async with engine:
        args = ["--engine_url", engine.url, "--redis_url", f"unix://{redis_socket}"]
        async with process(*args, "--metrics_port", "0") as child:
            entry = await line_of(child, "sidecar_failed")
            assert "--event_endpoint" in str(entry["error"])
            assert await child.wait() == 1


async def test_inspect_decodes_everything(
    redis_socket: Path, redis_client: redis.asyncio.Redis
) -> None:
    """Fleets, instances, routers and the size of the index, as one JSON document."""
    engine = EngineStandIn(running_count=2)
    url = f"unix://{redis_socket}"
    async with engine:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], range(64)))
        args = ["--engine_url", engine.url, "--redis_url", url, "--metrics_port", "0"]
        async with process(*args, "--instances_expected", "1") as child:
            await line_of(child, "events_subscribed")
            router = RouterId("r1")
            await functions.run(redis_client, reservations.register(FLEET, router, begin=True))
            fleet: dict[str, Any] = {}

            async def has_blocks_and_load() -> bool:
                fleet.update((await inspect(url))["fleets"][0])
                load = fleet["instances"][0]["running_count"]
                return (fleet["index"]["blocks_estimate"], load) == (4, 2)

            await until(has_blocks_and_load, "four blocks, two requests", 20)
    (instance,) = fleet["instances"]
    assert (fleet["model_scope"], fleet["block_size_tokens"], fleet["partitions"]) == ("m", 16, 1)
    assert (engine.url, 0, 1, ["USED"], 0.25) == (
        instance["url"],
        instance["slot"],
        instance["generation"],
        instance["flags"],
        instance["kv_usage_ratio"],
    )
    assert 0 < instance["lease_left_s"] <= 5
    assert [(r["router_id"], r["reservations"]) for r in fleet["routers"]] == [("r1", 0)]


async def inspect(url: str) -> dict[str, list[dict[str, Any]]]:
    """What the inspect command prints as JSON."""
    async with process("inspect", "--redis_url", url, "--format", "json") as child:
        out, err = await child.communicate()
        assert (child.returncode, err) == (0, b"")
    shown: dict[str, list[dict[str, Any]]] = json.loads(out)
    return shown


async def test_inspect_as_tables(redis_socket: Path, redis_client: redis.asyncio.Redis) -> None:
    """An empty server is said to be empty, an absent one is an error of one line."""
    assert await redis_client.ping()
    async with process("inspect", "--redis_url", f"unix://{redis_socket}") as child:
        out, _ = await child.communicate()
        assert out == b"No fleet is published here.\n"
    async with process("inspect", "--redis_url", "unix:///nowhere.sock") as child:
        _, err = await child.communicate()
        assert (child.returncode, err.count(b"\n")) == (1, 1)


@pytest.mark.parametrize("has_ring", [True, False])
async def test_paused_sidecar_asks_before_it_renews(
    redis_socket: Path, redis_client: redis.asyncio.Redis, has_ring: bool
) -> None:
    """Stopped, its lease ends and nobody is credited; continued, it claims nothing stale.

    Hundreds of batches wait for it, and the eviction that matters is the last of them; where there
    is a ring only that has it.
    """
    engine = EngineStandIn(publishers=[EventPublisher(has_replay=has_ring)])
    probe, cache = Probe(redis_client), Cache(engine.publishers[0])
    chat = prompt(1, 6)
    hurry = {
        "indexer.contract.fleet_functions:INSTANCE_LEASE_TTL_S": 2.0,
        "indexer.rank:INSTANCE_LEASE_TTL_S": 2.0,
    }

    async def arrives() -> bool:
        await cache.evict(chat)
        await cache.serve(chat)
        return await probe.eligible_depth(chat) == 6

    async def is_exact() -> bool:
        claimed, truth = await cache.claimed(probe), cache.truth()
        too_much = any(said > true for said, true in zip(claimed, truth, strict=True))
        assert not too_much, (claimed, truth, [line["event"] for line in sidecar.lines])
        return claimed == truth

    async with engine, sidecar_process(engine, redis_socket, constants=hurry) as sidecar:
        await until(arrives, "the sidecar sees a batch", 30)
        await cache.until_exact(probe)
        sidecar.child.send_signal(signal.SIGSTOP)
        await until_equal(-1, lambda: probe.eligible_depth(chat))
        for number in range(500):
            await cache.publisher.publish(stored([number], range(number, number + 16)))
        await cache.evict(chat, keep=1, skip_live=has_ring)
        sidecar.child.send_signal(signal.SIGCONT)
        await until(is_exact, "the index is right again", 30)
        assert sidecar.said("lease_had_ended") > 0
        assert sidecar.said("lease_not_renewed") > 0
