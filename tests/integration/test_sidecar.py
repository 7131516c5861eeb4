"""The sidecar against a real ZMQ publisher, a real HTTP engine and the embedded server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
from engine_stand_in import EngineStandIn, EventPublisher, removed, stored
from prometheus_client import CollectorRegistry

from indexer.config import SidecarConfig
from indexer.contract import block_hash, functions, keys
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX
from indexer.contract.records import FleetCounters, InstanceRecord, SlotFlag
from indexer.engine_api import EngineApi
from indexer.errors import EngineUnsuitable
from indexer.plan import FleetRecord
from indexer.redis_client import connect
from indexer.sidecar import Sidecar
from indexer.telemetry import Telemetry

pytestmark = pytest.mark.integration

FLEET = keys.fleet_id("m")
PROMPT = list(range(1000, 1000 + 64))  # four blocks of 16


class Probe:
    """What a router would see in Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.redis = client

    async def counters(self) -> FleetCounters | None:
        return functions.fleet_counters(await functions.run(self.redis, functions.read(FLEET)))

    async def slots(self) -> dict[int, int]:
        """Flags of the used slots."""
        counters = await self.counters()
        if counters is None:
            return {}
        flags = counters.slots["flags"]
        return {int(slot): int(flags[slot]) for slot in np.flatnonzero(flags)}

    async def instances(self) -> list[InstanceRecord]:
        raw = await self.redis.execute_command("HGETALL", keys.instances(FLEET))
        return [InstanceRecord.decode(value) for value in raw.values()]

    async def depths(self, tokens: Sequence[int] = PROMPT, **root: str) -> list[int]:
        """Leading blocks of 16 tokens by slot."""
        fields = await self.redis.hmget(
            keys.fleet(FLEET),
            ["model_scope", "block_size_tokens", "partitions", "bucket_bits", "epoch"],
        )
        if None in fields:
            return []
        fleet: FleetRecord = functions.fleet_record(FLEET, fields)
        start = block_hash.root(model_scope="m", block_size_tokens=16, **root)
        hashes = block_hash.chain(start, block_hash.pack_tokens(tokens), 16)
        out = np.zeros(SLOTS_PER_PARTITION_MAX, np.int64)
        reply = await functions.run(self.redis, functions.lookup(fleet, 0, hashes))
        functions.depths(reply, out)
        used = await self.slots()
        return [int(out[slot]) for slot in range(max(used, default=-1) + 1)]

    async def until(
        self, expected: object, read: Callable[[], Awaitable[object]], deadline_s: float = 10
    ) -> None:
        """Wait until a reading is as expected."""
        seen: object = None
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            try:
                seen = await read()
            except redis.exceptions.ConnectionError as error:
                seen = error
            if seen == expected:
                return
            await asyncio.sleep(0.02)
        assert expected == seen


@pytest.fixture
def probe(redis_client: redis.asyncio.Redis) -> Probe:
    return Probe(redis_client)


@asynccontextmanager
async def running(
    engine: EngineStandIn, socket: Path, **options: object
) -> AsyncIterator[CollectorRegistry]:
    """A sidecar of an engine; leaves at the end, as on SIGTERM. Yields its metrics."""
    config = SidecarConfig(
        engine_url=engine.url, redis_url=f"unix://{socket}", metrics_port=0, **options
    )
    client = connect(config.redis_url)
    registry = CollectorRegistry()
    async with EngineApi(config.engine_url, api_key=None) as api, asyncio.TaskGroup() as tasks:
        sidecar = Sidecar(config, api, client, telemetry=Telemetry(registry))
        task = tasks.create_task(sidecar.run())
        try:
            yield registry
        finally:
            task.cancel()
            await asyncio.wait([task])
            await client.aclose()


async def test_live_events_become_leading_blocks(redis_socket: Path, probe: Probe) -> None:
    """Stored blocks are found by content; removed ones end the prefix."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await probe.until([0], probe.depths)
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await engine.publishers[0].publish(removed([3]))
        await probe.until([2], probe.depths)


async def test_instance_is_announced(redis_socket: Path, probe: Probe) -> None:
    """What the engine tells over HTTP is what routers read."""
    engine = EngineStandIn(
        models=(
            {"id": "m", "root": "/models/r", "max_model_len": 4096},
            {"id": "alias", "root": "/models/r", "max_model_len": 4096},
            {"id": "lora", "root": "/l", "parent": "m"},
        )
    )
    async with engine, running(engine, redis_socket, advertised_url="http://pod-7:8000/"):
        await probe.until(1, lambda: _count(probe.instances()))
        (record,) = await probe.instances()
        assert record.instance_id.startswith("pod-7:8000/0#")
        assert (
            InstanceRecord(
                instance_id=record.instance_id,
                url="http://pod-7:8000",
                models=["m", "alias"],
                model_root="/models/r",
                block_size_tokens=16,
                adapters=["lora"],
                max_model_len_tokens=4096,
                capacity_blocks=1000,
                engine_version="0.32.0",
            )
            == record
        )


async def test_engine_load_is_published(redis_socket: Path, probe: Probe) -> None:
    """Running, waiting and KV$ usage arrive in the fleet's counters."""
    engine = EngineStandIn(running_count=3, waiting_count=2)

    async def load() -> list[int]:
        counters = await probe.counters()
        row = counters.slots[0] if counters is not None and len(counters.slots) else None
        names = ("running_count", "waiting_count", "kv_usage_millionths")
        return [] if row is None else [int(row[name]) for name in names]

    async with engine, running(engine, redis_socket):
        await probe.until([3, 2, 250_000], load)


@pytest.mark.parametrize("replay_frames", [3, 4])
async def test_late_join_replays_the_ring(
    redis_socket: Path, probe: Probe, replay_frames: int
) -> None:
    """What was published before the sidecar started is in the index, in both replay shapes."""
    engine = EngineStandIn(publishers=[EventPublisher(replay_frames=replay_frames)])
    async with engine:
        await engine.publishers[0].publish(stored([1, 2], PROMPT[:32]))
        await engine.publishers[0].publish(stored([3, 4], PROMPT[32:], parent=2))
        async with running(engine, redis_socket):
            await probe.until([4], probe.depths)


async def test_gap_is_filled_from_the_ring(redis_socket: Path, probe: Probe) -> None:
    """A batch the network lost comes from the replay, before the next one."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1], PROMPT[:16]))
        await probe.until([1], probe.depths)
        await publisher.publish(stored([2], PROMPT[16:32], parent=1), skip_live=True)
        await publisher.publish(stored([3], PROMPT[32:48], parent=2))
        await probe.until([3], probe.depths)
        assert _metric(metrics, "gaps_total") == 0


async def test_lost_history_clears_the_index(redis_socket: Path, probe: Probe) -> None:
    """When the ring has wrapped beyond a gap, only what arrived afterwards is credited."""
    engine = EngineStandIn(publishers=[EventPublisher(ring_batches=1)])
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await publisher.publish(removed([4, 3, 2]), skip_live=True)
        await publisher.publish(stored([9], range(16)))
        await probe.until([1], lambda: probe.depths(range(16)))
        assert [0] == await probe.depths()
        assert _metric(metrics, "batches_lost_total") == 1
        assert _metric(metrics, "completeness_ratio") < 1


async def test_without_replay_a_gap_clears_the_index(redis_socket: Path, probe: Probe) -> None:
    """No replay socket: a gap costs the instance its index, and the metrics say so."""
    engine = EngineStandIn(publishers=[EventPublisher(has_replay=False)])
    async with engine, running(engine, redis_socket) as metrics:
        publisher = engine.publishers[0]
        await _until_subscribed(publisher, probe)
        await publisher.publish(removed([77]), skip_live=True)
        await publisher.publish(stored([9], range(16)))
        await probe.until([1], lambda: probe.depths(range(16)))
        assert [0] == await probe.depths()
        assert _metric(metrics, "replay_available") == 0


async def test_restarted_engine_is_another_instance(redis_socket: Path, probe: Probe) -> None:
    """A new process under the same ports gets a new instance; the old one's blocks are gone."""
    first = EngineStandIn()
    async with first:
        ports = (first.publishers[0].port, first.publishers[0].replay_port)
        async with running(first, redis_socket):
            await first.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
            await probe.until([4], probe.depths)
            before = {record.instance_id for record in await probe.instances()}
            first.publishers[0].close()
            second = EventPublisher(ports=ports)
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(second.serve_replays())
                await second.publish(stored([5], range(16)))
                await probe.until(
                    (1, True),
                    lambda: _renewed(probe, before),
                )
                await probe.until(True, lambda: _holds(probe, range(16), 1))
                assert not await _holds(probe, PROMPT, 1)
                serving.cancel()
            second.close()


async def test_flushed_redis_is_filled_again(redis_socket: Path, probe: Probe) -> None:
    """A flush under a running sidecar: it joins anew and publishes its whole table."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket) as metrics:
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await probe.redis.flushall()
        await probe.redis.execute_command("FUNCTION", "FLUSH")
        await probe.until([4], probe.depths)
        assert _metric(metrics, "republishes_total") == 1


async def test_two_sidecars_survive_a_flush(redis_socket: Path, probe: Probe) -> None:
    """Both instances of a fleet are whole again; founding anew takes nothing from the other."""
    one, two = EngineStandIn(), EngineStandIn()
    async with one, two, running(one, redis_socket), running(two, redis_socket):
        for engine in (one, two):
            await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4, 4], probe.depths)
        await probe.redis.flushall()
        await probe.until([4, 4], probe.depths)


async def test_remains_of_an_expired_fleet_credit_nobody(redis_socket: Path, probe: Probe) -> None:
    """The record of a fleet expires, its index does not: a founder clears it away."""
    engine = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
    fresh = EngineStandIn()
    async with engine, running(engine, redis_socket):
        await engine.publishers[0].publish(stored([1, 2, 3, 4], PROMPT))
        await probe.until([4], probe.depths)
        await probe.redis.delete(keys.fleet(FLEET), keys.counters(FLEET), keys.instances(FLEET))
    async with fresh, running(fresh, redis_socket):
        await probe.until([0], probe.depths)


async def _count(items: Awaitable[Sequence[object]]) -> int:
    return len(await items)


async def _renewed(probe: Probe, before: set[str]) -> tuple[int, bool]:
    after = {record.instance_id for record in await probe.instances()}
    return len(after), not after & before


async def _holds(probe: Probe, tokens: Sequence[int], blocks: int) -> bool:
    return max(await probe.depths(tokens), default=0) >= blocks


async def _until_subscribed(publisher: EventPublisher, probe: Probe) -> None:
    """Publish until a batch arrives: without a replay nothing else tells."""
    for _ in range(500):
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        if await _holds(probe, PROMPT, 4):
            return
        await asyncio.sleep(0.02)
    pytest.fail("the sidecar never saw a batch")


def _metric(registry: CollectorRegistry, name: str) -> float:
    values = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"timestable_indexer_{name}"
    ]
    return sum(values)
