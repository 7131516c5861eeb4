"""A sidecar in this process, and what a router would see of it in Redis."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import redis.asyncio
from engine_stand_in import EventPublisher, stored
from prometheus_client import CollectorRegistry
from waiting import until

from indexer.config import SidecarConfig
from indexer.contract import (
    block_hash,
    fleet_functions,
    functions,
    index_functions,
    keys,
    reservations,
)
from indexer.contract.identifiers import SlotIndex
from indexer.contract.limits import SLOTS_PER_PARTITION_MAX
from indexer.contract.link import connected
from indexer.contract.records import FleetCounters, InstanceRecord, Notice, SlotFlag
from indexer.draining import Drain
from indexer.engine.engine_api import EngineApi
from indexer.sidecar import REDIS_DEADLINE_S, Sidecar
from indexer.telemetry import Telemetry

FLEET = keys.fleet_id("m")
PROMPT = list(range(1000, 1000 + 64))
"""Four blocks of 16 tokens."""


def chain_of(tokens: Sequence[int], **root: str) -> bytes:
    """Canonical hashes of a prompt's blocks of 16 tokens."""
    start = block_hash.root(model_scope="m", block_size_tokens=16, **root)
    return block_hash.chain(start, block_hash.pack_tokens(tokens), 16)


class Probe:
    """What a router would see in Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.redis = client
        self.told_count = 0

    async def counters(self) -> FleetCounters | None:
        return reservations.fleet_counters(
            await functions.run(self.redis, reservations.read(FLEET))
        )

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
        fleet = await fleet_functions.read_fleet(self.redis, FLEET)
        if fleet is None:
            return []
        hashes = chain_of(tokens, **root)
        out = np.zeros(SLOTS_PER_PARTITION_MAX, np.int64)
        reply = await functions.run(self.redis, index_functions.lookup(fleet, 0, hashes))
        index_functions.depths(reply, out)
        used = await self.slots()
        return [int(out[slot]) for slot in range(max(used, default=-1) + 1)]

    async def predict(self, tokens: Sequence[int]) -> tuple[float, int, int]:
        """Redis time, the only slot a router may choose (-1: there is none), and its depth."""
        counters = await self.counters()
        if counters is None:
            return 0.0, -1, -1
        slots = counters.slots
        leased = (slots["flags"] == SlotFlag.USED) & (slots["lease_until_s"] >= counters.now_s)
        eligible = np.flatnonzero(leased)
        assert len(eligible) <= 1, "one engine is two instances"
        if not len(eligible):
            return counters.now_s, -1, -1
        return counters.now_s, int(eligible[0]), (await self.depths(tokens))[eligible[0]]

    async def eligible_depth(self, tokens: Sequence[int]) -> int:
        """Leading blocks by the only instance a router may choose; -1 when there is none."""
        return (await self.predict(tokens))[2]

    async def tell(
        self, decided_s: float, slot: int, tokens: Sequence[int], predicted: int, actual: int
    ) -> None:
        """Leave a notice, as a router does, of predicted and actual hit tokens."""
        counters = await self.counters()
        assert counters is not None
        notice = Notice(
            decided_s=decided_s,
            predicted_tokens=predicted,
            actual_tokens=actual,
            hashes=chain_of(tokens),
        )
        generation = int(counters.slots["generation"][slot])
        call = fleet_functions.notice(FLEET, SlotIndex(slot), generation, notice.encode())
        self.told_count += await functions.run(self.redis, call)

    async def completeness(self) -> float:
        """As published for the only eligible instance."""
        counters = await self.counters()
        assert counters is not None
        used = counters.slots[counters.slots["flags"] == SlotFlag.USED]
        return float(used["completeness_millionths"][0]) / 1e6

    async def holds(self, tokens: Sequence[int], blocks: int) -> bool:
        """Whether an instance holds so many leading blocks."""
        return max(await self.depths(tokens), default=0) >= blocks


class HasUrl(Protocol):
    """An engine, real or not."""

    url: str


@asynccontextmanager
async def running(
    engine: HasUrl, where: Path | str, *, drain: Drain | None = None, **options: Any
) -> AsyncIterator[CollectorRegistry]:
    """A sidecar of an engine; leaves at the end, as on SIGTERM. Yields its metrics.

    Args:
        engine: whose API it asks.
        where: Redis's socket or URL.
        drain: whether it takes requests; it does when not given.
        options: of the sidecar.
    """
    config = SidecarConfig(
        engine_url=engine.url,
        redis_url=where if isinstance(where, str) else f"unix://{where}",
        metrics_port=0,
        **options,
    )
    registry = CollectorRegistry()
    async with (
        connected(config.redis_url, deadline_s=REDIS_DEADLINE_S) as link,
        EngineApi(config.engine_url, api_key=None) as api,
        asyncio.TaskGroup() as tasks,
    ):
        telemetry = Telemetry(registry)
        sidecar = Sidecar(config, api, link, telemetry=telemetry, drain=drain or Drain())
        task = tasks.create_task(sidecar.run())
        try:
            yield registry
        finally:
            task.cancel()
            await asyncio.wait([task])


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
