"""A fleet whose engines restart hundreds of times leaves nothing behind in Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
from engine_stand_in import EngineStandIn, stored
from prometheus_client import CollectorRegistry
from redis_servers import redis_server
from sidecar_run import FLEET, Probe
from waiting import until, until_equal

from indexer.config import SidecarConfig
from indexer.contract import fleet_functions, functions, keys, reservations
from indexer.contract.identifiers import RouterId
from indexer.contract.link import connected
from indexer.contract.records import SlotFlag
from indexer.draining import Drain
from indexer.engine.engine_api import EngineApi
from indexer.publishing import sweeper
from indexer.publishing.publisher import Publisher
from indexer.publishing.sweeper import SweeperLease
from indexer.sidecar import REDIS_DEADLINE_S, Sidecar
from indexer.telemetry import Telemetry

pytestmark = pytest.mark.integration

PLACES = 6
"""Engines at a time."""

SETTLED_RESTARTS, ALL_RESTARTS = 50, 300
BLOCKS = 400
"""Of each engine; what 300 of them leave behind would be twice the empty server's memory."""


class Killable(Sidecar):
    """A sidecar that may end without a word, as by SIGKILL."""

    is_killed = False

    async def _leave(self, publishers: list[Publisher], lease: SweeperLease) -> None:  # type: ignore[override]
        if not self.is_killed:
            await super()._leave(publishers, lease)


@asynccontextmanager
async def sidecar(engine: EngineStandIn, url: str) -> AsyncIterator[Killable]:
    """A sidecar in this process."""
    config = SidecarConfig(engine_url=engine.url, redis_url=url, metrics_port=0)
    async with (
        connected(url, deadline_s=REDIS_DEADLINE_S) as link,
        EngineApi(config.engine_url, api_key=None) as api,
        asyncio.TaskGroup() as tasks,
    ):
        telemetry = Telemetry(CollectorRegistry())
        one = Killable(config, api, link, telemetry=telemetry, drain=Drain())
        task = tasks.create_task(one.run())
        try:
            yield one
        finally:
            task.cancel()
            await asyncio.wait([task])


@dataclass
class Restarts:
    """Counts restarts, and has everybody wait at a number of them."""

    left: int
    begun: int = 0

    def next(self) -> int | None:
        """The number of the next one; None at the end."""
        if not self.left:
            return None
        self.left -= 1
        self.begun += 1
        return self.begun


async def live(probe: Probe, url: str, restarts: Restarts) -> None:
    """One place of the fleet: engine after engine, each in turn left or killed."""
    while (n := restarts.next()) is not None:
        tokens = [n * BLOCKS + i for i in range(BLOCKS) for _ in range(16)]
        engine = EngineStandIn()
        async with engine, sidecar(engine, url) as one:
            await engine.publishers[0].publish(stored(range(BLOCKS), tokens))
            await until(lambda tokens=tokens: probe.holds(tokens, BLOCKS), "the engine is indexed")
            one.is_killed = n % 3 == 0


async def route(client: redis.asyncio.Redis) -> None:
    """Reserve on whatever is open, and release most of it; the rest is left to be reaped."""
    router, sequence = RouterId("r"), 0
    while True:
        await functions.run(client, reservations.register(FLEET, router, begin=True))
        raw = await functions.run(client, reservations.read(FLEET))
        counters = reservations.fleet_counters(raw)
        if counters is not None:
            slots = counters.slots
            is_open = np.flatnonzero(slots["flags"] == SlotFlag.USED)
            rows = [(int(i), int(slots["generation"][i]), 50) for i in is_open]
            if rows:
                candidates = np.array(rows, reservations.CANDIDATE)
                for _ in range(3):
                    sequence += 1
                    call = reservations.reserve(FLEET, router, sequence, candidates)
                    await functions.run(client, call)
                for released in range(max(1, sequence - 8), sequence - 6):
                    await functions.run(client, reservations.release(FLEET, router, released))
        await asyncio.sleep(0.02)


@pytest.mark.timeout(180)
async def test_memory_stays_flat_over_hundreds_of_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots, blocks, reservations, keys and memory: after 300 restarts as after 50."""
    monkeypatch.setattr(fleet_functions, "INSTANCE_LEASE_TTL_S", 1.0)
    monkeypatch.setattr(sweeper, "INSTANCE_GRACE_S", 0.3)
    monkeypatch.setattr(sweeper, "INSTANCE_LEASE_TTL_S", 1.0)
    monkeypatch.setattr(sweeper, "ROUND_S", 0.2)
    monkeypatch.setattr(sweeper, "SWEEPER_LEASE_TTL_S", 2.0)
    figures = []
    last = EngineStandIn()
    # Without its log of slow commands, which grows by itself.
    with redis_server(tmp_path / "redis", "--slowlog-log-slower-than", "-1") as server:
        await until(server.answers, "the server answers")
        async with server.client() as client, last, sidecar(last, server.url):
            probe = Probe(client)
            await until_equal([0], lambda: used_slots(probe))
            for count in (SETTLED_RESTARTS, ALL_RESTARTS - SETTLED_RESTARTS):
                restarts = Restarts(left=count)
                async with asyncio.TaskGroup() as tasks:
                    routing = tasks.create_task(route(client))
                    async with asyncio.TaskGroup() as places:
                        for _ in range(PLACES):
                            places.create_task(live(probe, server.url, restarts))
                    routing.cancel()
                await functions.run(client, reservations.reap(FLEET, RouterId("r")))
                await until_equal(1, lambda: count_used(probe))
                figures.append(await remains(client))
            counters = await probe.counters()
            assert counters is not None
            joins = int(counters.slots["generation"].sum())
            for column in ("reserved_requests", "reserved_prefill_tokens", "foreign_requests"):
                assert not counters.slots[column].any()
    assert joins >= 1 + ALL_RESTARTS
    (settled_bytes, settled_keys), (all_bytes, all_keys) = figures
    assert settled_keys == all_keys
    assert all_bytes == pytest.approx(settled_bytes, rel=0.03)


async def used_slots(probe: Probe) -> list[int]:
    """Slots that are not free."""
    return list(await probe.slots())


async def count_used(probe: Probe) -> int:
    """How many slots are not free."""
    return len(await probe.slots())


async def remains(client: redis.asyncio.Redis) -> tuple[int, list[bytes]]:
    """Used memory, and the keys there are but for what expires by itself."""
    await client.memory_purge()
    used_bytes = int((await client.info("memory"))["used_memory"])
    found = [key async for key in client.scan_iter()]
    return used_bytes, sorted(set(found) - {keys.sweeper(FLEET).encode()})
