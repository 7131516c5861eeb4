"""Books that do not balance: told by `inspect --check`, set right by the sweeper."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
import redis.asyncio
from decision_core import RouterCore
from fleets import found_fleet, reserved
from prometheus_client import CollectorRegistry

from indexer.contract import audit, functions, keys
from indexer.contract.identifiers import RouterId, SlotIndex
from indexer.contract.link import connected
from indexer.publishing.memory import MemoryKeeper
from indexer.publishing.sweeper import Sweeper, SweeperLease
from indexer.telemetry import Telemetry

pytestmark = pytest.mark.integration


async def check(socket: Path | str) -> tuple[int | None, str]:
    """Exit status and output of the command."""
    command = (sys.executable, "-m", "indexer", "inspect", "--check", "true")
    child = await asyncio.create_subprocess_exec(
        *command, "--redis_url", f"unix://{socket}", stdout=PIPE, stderr=PIPE
    )
    async with asyncio.timeout(20):
        out, _ = await child.communicate()
    return child.returncode, out.decode()


async def test_the_command_tells_a_difference_and_the_sweeper_sets_it_right(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """0 while the books balance, 1 once a ledger is deleted by hand; a round sets it right."""
    fleet = await found_fleet(redis_client)
    await redis_client.expire(keys.directory(), 60)
    async with connected(f"unix://{redis_socket}") as link:
        router = RouterCore(link, deadline_s=5.0)
        await router.decide()
        telemetry = Telemetry(CollectorRegistry())
        memory = MemoryKeeper(link, telemetry, index_bytes_max=None)
        sweeper = Sweeper(link, SweeperLease(link, fleet.fleet_id), memory, telemetry)
        books = audit.audited(await functions.run(link, audit.audit(fleet.fleet_id)))
        assert (books.balances, books.reservations) == (True, 1)

        status, out = await check(redis_socket)
        assert status == 0, out
        (ledger,) = await redis_client.keys("*:ledger:*")
        await redis_client.delete(ledger)
        status, out = await check(redis_socket)
        assert status == 1
        assert "+1 requests" in out

        await sweeper.round(fleet)
        assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]
        books = audit.audited(await functions.run(link, audit.audit(fleet.fleet_id)))
        assert books.balances


async def test_without_redis_nothing_is_said() -> None:
    """Neither good nor bad: a status of its own."""
    assert (await check("/nowhere.sock"))[0] == 3


async def test_keys_that_nobody_owns_are_told(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """A key without an expiry, a ledger without a router, a block that no request awaits."""
    fleet = (await found_fleet(redis_client)).fleet_id
    orphan, awaited = keys.ledger(fleet, RouterId("r")), keys.awaited(fleet, SlotIndex(0))
    await redis_client.hset(orphan, b"12345678", b"x")
    await redis_client.hset(awaited, b"12345678r", b"h" * 8)
    await redis_client.expire(orphan, 60)
    await redis_client.expire(awaited, 60)
    await redis_client.persist(keys.counters(fleet))
    async with connected(f"unix://{redis_socket}") as link:
        await functions.load(link)
        found = {(one.key, one.reason) for one in await audit.leftovers(link, [fleet])}
    assert found >= {
        (keys.counters(fleet), "no expiry"),
        (orphan, "ledger of no registered router"),
        (awaited, "awaited by no reservation in prefill"),
    }
