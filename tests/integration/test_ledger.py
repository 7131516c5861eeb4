"""Reservations on a real server: the books balance whatever happens in between."""

import asyncio
import contextlib
from collections import Counter

import pytest
import redis.asyncio
from builders import make_request
from decision_core import PROMPT, RouterCore, running
from fleets import chain, found_fleet, reserved, store, until
from waiting import until_equal

from indexer.contract import fleet_functions, functions, keys, reservations
from indexer.contract.link import connected
from indexer.contract.records import FleetRecord
from router.eligibility import eligible_snapshot
from router.errors import NoEligibleInstance
from router.policies import POLICIES

pytestmark = pytest.mark.integration


@pytest.fixture
async def fleet(redis_client: redis.asyncio.Redis) -> FleetRecord:
    """Two idle instances; the first holds 48 tokens of PROMPT."""
    fleet = await found_fleet(redis_client)
    await store(redis_client, fleet, 0, chain(fleet, PROMPT)[:3])
    return fleet


async def test_a_request_is_booked_until_it_ends(redis_client, redis_socket, fleet) -> None:
    """Requests and tokens at the decision, tokens off at the first token, nothing at the end."""
    async with running(redis_socket) as router:
        decision, booking = await router.decide()
        assert (decision.instance.instance_id, decision.hit_tokens) == ("a", 48)
        assert await reserved(redis_client, fleet) == [(1, 52), (0, 0)]

        router.ledger.prefilled(booking)
        router.ledger.prefilled(booking)
        await until(router.ledger.settled, "notes are sent")
        assert await reserved(redis_client, fleet) == [(1, 0), (0, 0)]

        router.ledger.release(booking)
        router.ledger.release(booking)
        await until(router.ledger.settled, "notes are sent")
        assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_every_policy_books_what_it_chose(redis_client, redis_socket, fleet, policy) -> None:
    """The chosen slot carries the request."""
    async with running(redis_socket) as router:
        decision, _ = await router.decide(policy)
        expected = [(0, 0), (0, 0)]
        expected[decision.slot] = (1, decision.new_prefill_tokens)
        assert await reserved(redis_client, fleet) == expected


async def test_routers_that_decide_at_once_do_not_herd(redis_client, redis_socket) -> None:
    """200 equal requests through 4 routers land as evenly as one router would place them."""
    await found_fleet(redis_client, names=[f"i{n}" for n in range(8)])
    async with contextlib.AsyncExitStack() as stack:
        contexts = [running(redis_socket, deadline_s=5.0) for _ in range(4)]
        routers = [await stack.enter_async_context(context) for context in contexts]
        for router in routers:
            await router.index.refresh()
        decisions = await asyncio.gather(*(routers[n % 4].decide() for n in range(200)))

    landed = Counter(decision.instance.instance_id for decision, _ in decisions)
    assert sum(not decision.degraded for decision, _ in decisions) == 200
    assert max(landed.values()) - min(landed.values()) <= 1


async def test_a_client_that_leaves_during_the_reservation_leaves_nothing(
    redis_client, redis_socket, fleet
) -> None:
    """A cancelled reservation may have been booked all the same; it is taken back."""
    async with running(redis_socket) as router:
        await router.decide()  # registered, connected
        await until(router.ledger.settled, "settled")
        for delay_steps in range(12):
            task = asyncio.ensure_future(router.decide())
            for _ in range(delay_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and task.exception() is None:
                router.ledger.release(task.result()[1])
        await until(router.ledger.settled, "settled")
        assert [requests for requests, _ in await reserved(redis_client, fleet)] == [1, 0]


async def test_a_silent_redis_degrades_and_the_books_are_caught_up(
    redis_client, redis_socket, fleet
) -> None:
    """Requests decided alone are booked when Redis is back, and released like the others."""
    async with running(redis_socket) as router:
        first = await router.decide()
        await redis_client.execute_command("CLIENT", "PAUSE", 1500, "ALL")
        alone = [await router.decide() for _ in range(4)]
        assert [decision.degraded for decision, _ in alone] == [True] * 4
        # Its own book is all it has, and that spreads the load: a has the first request already.
        assert Counter(d.instance.instance_id for d, _ in (first, *alone))["a"] in {2, 3}

        async def caught_up() -> bool:
            return sum(requests for requests, _ in await reserved(redis_client, fleet)) == 5

        await until(caught_up, "all five are booked")
        for _, booking in (first, *alone):
            router.ledger.release(booking)
        await until(router.ledger.settled, "settled")
        assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]


async def test_a_flushed_redis_is_told_everything_again(redis_client, redis_socket, fleet) -> None:
    """After a loss of data the books are rebuilt from the routers' memory."""
    async with running(redis_socket) as router:
        decision, booking = await router.decide()
        await redis_client.flushall()
        await found_fleet(redis_client, epoch=8)

        async def told() -> bool:
            return (await reserved(redis_client, fleet))[decision.slot][0] == 1

        await until(told, "the reservation is booked again")
        router.ledger.release(booking)
        await until(router.ledger.settled, "settled")

        async def zero() -> bool:
            return await reserved(redis_client, fleet) == [(0, 0), (0, 0)]

        await until(zero, "zero")
        assert router.ledger.settled()


async def test_requests_from_before_a_flush_do_not_disturb_those_after(
    redis_client, redis_socket, fleet
) -> None:
    """Their ends change nothing in the new books, and the router registers once."""
    async with running(redis_socket) as router:
        before = [await router.decide() for _ in range(4)]
        await redis_client.flushall()
        # The same instances come back the other way round.
        await found_fleet(redis_client, names=["b", "a"], epoch=8)
        after = []
        for decision, booking in before:
            after.append(await router.decide())
            router.ledger.prefilled(booking)
            router.ledger.release(booking)
            assert decision.instance.instance_id in {"a", "b"}
        await until(router.ledger.settled, "settled")

        expected = Counter(decision.slot for decision, _ in after)
        requests = [requests for requests, _ in await reserved(redis_client, fleet)]
        assert requests == [expected[0], expected[1]]
        assert await redis_client.zcard(keys.routers(fleet.fleet_id)) == 1
        for _, booking in after:
            router.ledger.release(booking)
        await until(router.ledger.settled, "settled")
        assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]


async def test_a_router_that_ends_gives_everything_back(redis_client, redis_socket, fleet) -> None:
    """Nobody has to wait for its lease."""
    async with running(redis_socket) as router:
        await router.decide()
    assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]
    assert await redis_client.keys("*ledger*") == []


async def test_a_killed_router_is_reaped_by_another(redis_client, redis_socket, fleet) -> None:
    """Its reservations end with its lease."""
    async with connected(f"unix://{redis_socket}") as link:
        await RouterCore(link).decide()  # its ledger's task, which would give it back, never runs
    routers = keys.routers(fleet.fleet_id)
    ((router_id, _),) = await redis_client.zrange(routers, 0, -1, withscores=True)
    await redis_client.zadd(routers, {router_id: 1.0})  # its lease ended long ago

    async with running(redis_socket) as other:
        _, booking = await other.decide()

        async def reaped() -> bool:
            return sum(requests for requests, _ in await reserved(redis_client, fleet)) == 1

        await until(reaped, "the dead router's reservation is gone")
        other.ledger.release(booking)
        await until(other.ledger.settled, "settled")
    assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]


async def test_a_paused_router_registers_anew_and_books_again(
    redis_client, redis_socket, fleet
) -> None:
    """A router that others have reaped finds its lease gone and sends its whole book."""
    async with running(redis_socket) as router:
        _, booking = await router.decide()
        routers = keys.routers(fleet.fleet_id)
        ((first_id, _),) = await redis_client.zrange(routers, 0, -1, withscores=True)
        await functions.run(redis_client, reservations.reap(fleet.fleet_id, first_id.decode()))

        async def registered_anew() -> bool:
            ids = await redis_client.zrange(routers, 0, -1)
            return bool(ids) and ids != [first_id] and router.ledger.settled()

        await until(registered_anew, "another registration")
        assert sum(requests for requests, _ in await reserved(redis_client, fleet)) == 1
        router.ledger.release(booking)
        await until(router.ledger.settled, "settled")
        assert await reserved(redis_client, fleet) == [(0, 0), (0, 0)]


async def test_no_candidate_left_is_said(redis_client, redis_socket, fleet) -> None:
    """All instances gone between snapshot and reservation is a condition of its own."""
    async with running(redis_socket) as router:
        await router.index.refresh()
        served = await router.index.find("m")
        assert served is not None
        snapshot = eligible_snapshot(await router.index.look(served, b""), 10)
        for slot in (0, 1):
            await functions.run(redis_client, fleet_functions.close(fleet.fleet_id, slot, 1, -1))
        for policy in ("lmetric", "round_robin"):
            with pytest.raises(NoEligibleInstance):
                await router.ledger.reserve(POLICIES[policy], make_request(10), snapshot)


@pytest.mark.parametrize("spoilt", ["ledger", "routers"])
async def test_a_fleet_whose_keys_fail_costs_no_other_fleet_anything(
    redis_client, redis_socket, fleet, spoilt
) -> None:
    """The other keeps its lease, notes and syncs; the notes of the spoilt one end, and it heals."""
    other = await found_fleet(
        redis_client, names=("c", "d"), fleet_id=keys.fleet_id("n"), model_scope="n"
    )
    async with running(redis_socket) as router:
        (_, spoilt_booking), (_, booking) = await router.decide(), await router.decide(model="n")
        (_, undone) = await router.decide(model="n")
        await until(router.ledger.settled, "settled")
        spoilt_id = await redis_client.zrange(keys.routers(fleet.fleet_id), 0, -1)
        key = {
            "ledger": keys.ledger(fleet.fleet_id, spoilt_id[0].decode()),
            "routers": keys.routers(fleet.fleet_id),
        }[spoilt]
        await redis_client.set(key, "no such thing")
        router.ledger.prefilled(spoilt_booking)
        router.ledger.release(booking)

        routers = keys.routers(other.fleet_id)
        ((lost_id, _),) = await redis_client.zrange(routers, 0, -1, withscores=True)
        await functions.run(redis_client, reservations.reap(other.fleet_id, lost_id.decode()))

        async def as_if_alone() -> tuple[bool, list[int]]:
            ids = await redis_client.zrange(routers, 0, -1)
            requests = [requests for requests, _ in await reserved(redis_client, other)]
            return bool(ids) and ids != [lost_id], sorted(requests)

        await until_equal((True, [0, 1]), as_if_alone)
        router.ledger.release(undone)

        async def is_told() -> list[tuple[int, int]]:
            return await reserved(redis_client, other)

        await until_equal([(0, 0), (0, 0)], is_told)
        await until(lambda: not router.ledger._notes, "refused notes are not repeated")
        await redis_client.delete(key)

        async def healed() -> tuple[bool, int, int]:
            ids = await redis_client.zrange(keys.routers(fleet.fleet_id), 0, -1)
            ledgers = [keys.ledger(fleet.fleet_id, one.decode()) for one in ids]
            booked = sum([await redis_client.hlen(ledger) for ledger in ledgers])
            return router.ledger.settled(), len(ids), booked

        await until_equal((True, 1, 1), healed)
