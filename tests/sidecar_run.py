"""A sidecar in this process, and what a router would see of it in Redis."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import redis.asyncio
from engine_stand_in import EngineStandIn, EventPublisher, stored
from prometheus_client import CollectorRegistry
from waiting import until

from indexer.config import SidecarConfig
from indexer.contract import block_hash, functions, keys
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX
from indexer.contract.records import FleetCounters, InstanceRecord
from indexer.engine_api import EngineApi
from indexer.redis_client import connect
from indexer.sidecar import Sidecar
from indexer.telemetry import Telemetry

FLEET = keys.fleet_id("m")
PROMPT = list(range(1000, 1000 + 64))
"""Four blocks of 16 tokens."""


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
        fleet = await functions.read_fleet(self.redis, FLEET)
        if fleet is None:
            return []
        start = block_hash.root(model_scope="m", block_size_tokens=16, **root)
        hashes = block_hash.chain(start, block_hash.pack_tokens(tokens), 16)
        out = np.zeros(SLOTS_PER_PARTITION_MAX, np.int64)
        reply = await functions.run(self.redis, functions.lookup(fleet, 0, hashes))
        functions.depths(reply, out)
        used = await self.slots()
        return [int(out[slot]) for slot in range(max(used, default=-1) + 1)]

    async def holds(self, tokens: Sequence[int], blocks: int) -> bool:
        """Whether an instance holds so many leading blocks."""
        return max(await self.depths(tokens), default=0) >= blocks


@asynccontextmanager
async def running(
    engine: EngineStandIn, redis_path: Path, **options: Any
) -> AsyncIterator[CollectorRegistry]:
    """A sidecar of an engine; leaves at the end, as on SIGTERM. Yields its metrics."""
    config = SidecarConfig(
        engine_url=engine.url, redis_url=f"unix://{redis_path}", metrics_port=0, **options
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


async def until_subscribed(publisher: EventPublisher, probe: Probe) -> None:
    """Publish until a batch arrives: without a replay nothing else tells."""

    async def has_arrived() -> bool:
        await publisher.publish(stored([1, 2, 3, 4], PROMPT))
        return await probe.holds(PROMPT, 4)

    await until(has_arrived, "the sidecar sees a batch")


def metric(registry: CollectorRegistry, name: str) -> float:
    """Sum of a metric of the sidecar over its labels."""
    values = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"timestable_indexer_{name}"
    ]
    return sum(values)
