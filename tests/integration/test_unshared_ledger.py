"""Routers that share no reservations: for measuring what reservations are worth."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from decision_core import PROMPT, RouterCore, running
from fleets import chain, found_fleet, read, report, reserved, store

from indexer.contract.link import connected
from router.unshared_ledger import UnsharedLedger

pytestmark = pytest.mark.integration


@contextlib.asynccontextmanager
async def unshared(socket: Path) -> AsyncIterator[RouterCore]:
    """The decision core of a router with `--share_reservations false`."""
    async with connected(f"unix://{socket}") as link:
        router = RouterCore(link, in_flight_credit=False)
        router.ledger = UnsharedLedger(link, deadline_s=1.0)
        yield router


async def everything(client: redis.asyncio.Redis) -> dict[bytes, bytes | None]:
    """What Redis holds."""
    return {key: await client.dump(key) for key in await client.keys("*")}


async def test_nothing_is_booked_in_redis(redis_client, redis_socket) -> None:
    """Not a byte changes from decision to release, and the index is used as ever."""
    fleet = await found_fleet(redis_client)
    await store(redis_client, fleet, 1, chain(fleet, PROMPT)[:3])
    async with unshared(redis_socket) as router:
        before = await everything(redis_client)
        decision, booking = await router.decide()
        assert (decision.instance.instance_id, decision.hit_tokens) == ("b", 48)
        router.ledger.prefilled(booking)
        router.ledger.release(booking)
        assert await everything(redis_client) == before


async def test_nobodys_reservations_are_read(redis_client, redis_socket) -> None:
    """What another router has booked is invisible until an engine reports it."""
    await found_fleet(redis_client, names=["a"])
    async with running(redis_socket) as sharing, unshared(redis_socket) as router:
        await sharing.decide()
        decision, _ = await router.decide()
        assert (decision.batch_size, decision.queued_prefill_tokens) == (0, 0)


async def test_no_request_is_counted_twice_nor_lost_beside_a_report(
    redis_client, redis_socket
) -> None:
    """Own requests now, plus what was reported beyond own requests at the time of the report."""
    fleet = await found_fleet(redis_client, names=["a"])
    async with unshared(redis_socket) as router:
        first, first_booking = await router.decide()
        second, second_booking = await router.decide()
        assert [first.batch_size, second.batch_size] == [0, 1]
        assert second.queued_prefill_tokens == first.new_prefill_tokens

        await report(redis_client, fleet, 0, running=4, waiting=1)  # both, and three of others
        third, _ = await router.decide()
        assert third.batch_size == 2 + 3

        router.ledger.release(first_booking)  # the report still has it
        router.ledger.release(second_booking)
        router.ledger.release(second_booking)
        fourth, _ = await router.decide()
        assert fourth.batch_size == 1 + 3

        await report(redis_client, fleet, 0, running=5, waiting=0)  # third, fourth, three others
        fifth, _ = await router.decide()
        assert (fifth.batch_size, fifth.degraded) == (2 + 3, False)
    assert await reserved(redis_client, fleet) == [(0, 0)]
    assert int((await read(redis_client, fleet)).slots["foreign_requests"][0]) == 5
