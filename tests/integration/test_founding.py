"""A fleet that is founded again is another one, whoever founds it."""

import asyncio
from pathlib import Path
from typing import Final

import pytest
import redis.asyncio
from builders import make_fleet_record, make_instance
from prometheus_client import CollectorRegistry

from indexer.contract import fleet_functions, functions, keys
from indexer.contract.identifiers import InstanceId
from indexer.contract.link import Link, connected
from indexer.contract.records import FleetRecord
from indexer.publishing.founding import find_or_found
from indexer.publishing.memory import MemoryKeeper
from indexer.publishing.sweeper import SWEEPER_LEASE_TTL_S, Sweeper, SweeperLease
from indexer.telemetry import Telemetry
from router.index.index_client import IndexClient

pytestmark = pytest.mark.integration

FOUNDING: Final = make_fleet_record()


async def found(link: Link) -> FleetRecord:
    """As the same sidecar does it each time."""
    lease = SweeperLease(link, FOUNDING.fleet_id)
    fleet = await find_or_found(link, FOUNDING, lease)
    await link.execute_command("SADD", keys.directory(), fleet.fleet_id)
    return fleet


async def join(link: Link, name: str) -> None:
    """Take the next slot."""
    record = make_instance(name, models=[FOUNDING.model_scope]).encode()
    assert await functions.run(link, fleet_functions.join(FOUNDING.fleet_id, record))


@pytest.mark.parametrize("lost", ["everything", "counters"])
async def test_a_router_sees_who_is_in_a_fleet_founded_again(
    redis_client: redis.asyncio.Redis, redis_socket: Path, lost: str
) -> None:
    """As many join as had joined before, in another order: the routers' sums are the same."""
    await redis_client.flushall()
    async with connected(f"unix://{redis_socket}") as link:
        await functions.load(link)
        first = await found(link)
        for name in ("a", "b"):
            await join(link, name)
        index = IndexClient(link, deadline_s=2.0)
        await index.refresh()

        if lost == "everything":
            await redis_client.flushall()
        else:
            await redis_client.delete(keys.counters(first.fleet_id))
        again = await found(link)
        for name in ("b", "c"):
            await join(link, name)
        await index.refresh()

        assert index.instance_ids() == {InstanceId("b"), InstanceId("c")}
        assert (again.epoch == first.epoch) == (lost == "counters")


async def test_a_sidecar_without_an_engine_lets_others_found(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """It sweeps, so it has the lease that founding takes; its engine may never come back."""
    await redis_client.flushall()
    async with connected(f"unix://{redis_socket}") as link:
        await functions.load(link)
        lease = SweeperLease(link, FOUNDING.fleet_id)
        telemetry = Telemetry(CollectorRegistry())
        memory = MemoryKeeper(link, telemetry, index_bytes_max=None)
        sweeper = Sweeper(link, lease, memory, telemetry)
        first = await find_or_found(link, FOUNDING, lease)
        await sweeper.round(first)
        others = SweeperLease(link, FOUNDING.fleet_id)
        assert not await others.hold()

        await redis_client.flushall()
        lease.founders += 1
        await sweeper.round(first)
        assert not await others.hold(), "one of its own is founding"
        lease.founders -= 1
        await sweeper.round(first)
        async with asyncio.timeout(SWEEPER_LEASE_TTL_S / 2):
            again = await find_or_found(link, FOUNDING, others)
        assert again.epoch != first.epoch
