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
from indexer.contract.limits import RESERVATIONS_PER_AUDIT_MAX
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


async def test_more_reservations_than_one_call_compares_are_no_proof_of_anything(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """Audit, command and sweeper say that they did not look, and nothing is set right unseen."""
    fleet = await found_fleet(redis_client)
    await redis_client.expire(keys.directory(), 60)
    async with connected(f"unix://{redis_socket}") as link:
        await RouterCore(link, deadline_s=5.0).decide()
        (ledger,) = await redis_client.keys("*:ledger:*")
        held = await reserved(redis_client, fleet)
        fields = {n.to_bytes(8, "big"): b"x" for n in range(1, RESERVATIONS_PER_AUDIT_MAX)}
        await redis_client.hset(ledger, mapping=fields)
        books = audit.audited(await functions.run(link, audit.audit(fleet.fleet_id)))
        assert books.looked, "as many as may be looked at"

        await redis_client.hset(ledger, b"one more", b"x")
        books = audit.audited(await functions.run(link, audit.audit(fleet.fleet_id)))
        assert (books.looked, books.balances, books.differences) == (False, False, ())
        assert await functions.run(link, audit.balance(fleet.fleet_id)) == [0, 0]
        status, out = await check(redis_socket)
        assert (status, f"{RESERVATIONS_PER_AUDIT_MAX} that one call compares" in out) == (1, True)

        registry = CollectorRegistry()
        telemetry = Telemetry(registry)
        memory = MemoryKeeper(link, telemetry, index_bytes_max=None)
        sweeper = Sweeper(link, SweeperLease(link, fleet.fleet_id), memory, telemetry)
        await sweeper.round(fleet)
        assert registry.get_sample_value("timestable_indexer_audits_left_out_total") == 1
        assert await reserved(redis_client, fleet) == held


async def test_without_redis_nothing_is_said() -> None:
    """Neither good nor bad: a status of its own."""
    assert (await check("/nowhere.sock"))[0] == 3


async def test_keys_that_nobody_owns_are_told(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """A key without an expiry, a ledger without a router, a block that no request awaits.

    Whoever made them: a key that nobody could read hides no other.
    """
    fleet = (await found_fleet(redis_client)).fleet_id
    orphan, awaited = keys.ledger(fleet, RouterId("r")), keys.awaited(fleet, SlotIndex(0))
    await redis_client.hset(orphan, b"12345678", b"x")
    await redis_client.hset(awaited, b"12345678r", b"h" * 8)
    odd = [awaited.encode() + b"\xff", awaited.encode() + b"x"]
    for key in odd:
        await redis_client.hset(key, b"12345678\xff", b"h" * 8)
    for key in (orphan, awaited, *odd):
        await redis_client.expire(key, 60)
    await redis_client.persist(keys.counters(fleet))
    async with connected(f"unix://{redis_socket}") as link:
        await functions.load(link)
        found = {(one.key, one.reason) for one in await audit.leftovers(link, [fleet])}
    assert found >= {
        (keys.counters(fleet), "no expiry"),
        (orphan, "ledger of no registered router"),
        (awaited, "awaited by no reservation in prefill"),
        (awaited + "\\xff", "awaited by no reservation in prefill"),
        (awaited + "x", "awaited by no reservation in prefill"),
    }
