"""The index of a fleet without sidecars ends by itself; that of a quiet one stays."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from builders import make_fleet_record, make_instance
from prometheus_client import CollectorRegistry
from waiting import until

from deploy.local import embedded_redis
from indexer.contract import fleet_functions, functions, index_functions, keys
from indexer.contract.identifiers import BlockHash, SlotIndex
from indexer.contract.limits import INDEX_TTL_S
from indexer.contract.link import Link, connected
from indexer.publishing import sweeper
from indexer.publishing.memory import MemoryKeeper
from indexer.publishing.sweeper import Sweeper, SweeperLease
from indexer.telemetry import Telemetry

pytestmark = pytest.mark.integration

FLEET = make_fleet_record(partitions=2, bucket_bits=6)
HASHES = [BlockHash((n * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big")) for n in range(200)]
"""Spread over all buckets, as real ones are."""

SLOTS = (SlotIndex(0), SlotIndex(256))


@pytest.fixture
async def client(redis_socket: Path) -> AsyncIterator[redis.asyncio.Redis]:
    """Sees every key."""
    async with embedded_redis.client(f"unix://{redis_socket}") as client:
        await client.flushdb()
        yield client


@pytest.fixture
async def link(redis_socket: Path, client: redis.asyncio.Redis) -> AsyncIterator[Link]:
    """A fleet of two instances in two partitions, with blocks."""
    async with connected(f"unix://{redis_socket}") as link:
        await functions.load(link)
        await functions.run(link, fleet_functions.create(FLEET))
        for slot in SLOTS:
            record = make_instance(f"i{slot}").encode()
            assert await functions.run(link, fleet_functions.join(FLEET.fleet_id, record))
            assert await functions.run(link, index_functions.open_slot(FLEET, slot, 1))
            assert await functions.run(link, index_functions.store(FLEET, slot, 1, HASHES))
        yield link


def make_sweeper(link: Link) -> Sweeper:
    """That of a sidecar."""
    telemetry = Telemetry(CollectorRegistry())
    memory = MemoryKeeper(link, telemetry, index_bytes_max=None)
    return Sweeper(link, SweeperLease(link, FLEET.fleet_id), memory, telemetry)


async def index_ttls_s(client: redis.asyncio.Redis) -> dict[bytes, int]:
    """Seconds until each key of the index expires; -1 for never."""
    patterns = [keys.partition_pattern(index_functions.anchor(FLEET, p)) for p in range(2)]
    names = [key for pattern in patterns for key in await client.keys(pattern)]
    return {name: await client.ttl(name) for name in names}


@pytest.mark.usefixtures("link")
async def test_every_key_expires(client: redis.asyncio.Redis) -> None:
    """Also a bucket that was emptied and filled again: a fleet that falls silent leaves nothing."""
    await functions.run(client, index_functions.remove(FLEET, SLOTS[0], 1, HASHES[::-1]))
    await functions.run(client, index_functions.store(FLEET, SLOTS[0], 1, HASHES))
    names = await client.keys("*")
    assert len(names) > 100
    assert -1 not in [await client.ttl(name) for name in names]


async def test_silent_fleet_leaves_no_key(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks go without anybody's help."""
    monkeypatch.setattr(index_functions, "INDEX_TTL_S", 1)
    monkeypatch.setattr(fleet_functions, "DIRECTORY_TTL_S", 1)
    await functions.load(client)
    await functions.run(client, fleet_functions.create(FLEET))
    await functions.run(client, fleet_functions.join(FLEET.fleet_id, make_instance().encode()))
    await functions.run(client, index_functions.open_slot(FLEET, SLOTS[0], 1))
    assert await functions.run(client, index_functions.store(FLEET, SLOTS[0], 1, HASHES))

    async def is_empty() -> bool:
        return await client.dbsize() == 0

    await until(is_empty, "every key expires")


async def test_quiet_fleet_keeps_its_blocks(
    client: redis.asyncio.Redis, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sweeps puts off every expiry, of keys of earlier versions too, now and then."""
    ours = make_sweeper(link)
    before = await index_ttls_s(client)
    some, others = list(before)[::2], list(before)[1::2]
    for name in some:
        await client.expire(name, 60)
    for name in others:
        await client.persist(name)
    await ours.round(FLEET)
    after = await index_ttls_s(client)
    assert after.keys() == before.keys()
    assert all(INDEX_TTL_S - 60 <= ttl_s <= INDEX_TTL_S for ttl_s in after.values())

    await client.expire(some[0], 60)
    await ours.round(FLEET)
    assert await client.ttl(some[0]) <= 60
    monkeypatch.setattr(sweeper, "INDEX_RENEW_S", 0.0)
    await ours.round(FLEET)
    assert await client.ttl(some[0]) > 60
