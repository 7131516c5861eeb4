"""Requests in prefill are credited to their siblings: bursts are placed as if blocks were known."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import redis.asyncio
from builders import make_instance
from decision_core import RouterCore, running
from fleets import found_fleet, report, reserved, until

from indexer.contract import fleet_functions, functions, keys, reservations
from indexer.contract.identifiers import RouterId
from indexer.contract.records import FleetRecord
from router.snapshot import Booking, Decision

pytestmark = pytest.mark.integration

BLOCK = 16
SHARED = list(range(64 * BLOCK))
LONG = [7] * (500 * BLOCK)
DEADLINE_S = 10.0
"""These tests are about where requests go, on a machine that may be busy."""

Booked = list[tuple[Decision, Booking]]


@contextlib.asynccontextmanager
async def four(socket: Path, *, in_flight_credit: bool = True) -> AsyncIterator[list[RouterCore]]:
    """Four routers that know the fleet."""
    async with contextlib.AsyncExitStack() as stack:
        contexts = [
            running(socket, deadline_s=DEADLINE_S, in_flight_credit=in_flight_credit)
            for _ in range(4)
        ]
        routers = [await stack.enter_async_context(context) for context in contexts]
        for router in routers:
            await router.index.refresh()
        yield routers


async def burst(routers: Sequence[RouterCore], count: int, policy: str = "lmetric") -> Booked:
    """Equal long prompts at once, through all routers."""
    return await asyncio.gather(
        *(routers[n % len(routers)].decide(policy, prompt=LONG) for n in range(count))
    )


async def loaded_fleet(
    client: redis.asyncio.Redis, batches: Sequence[int], queues: Sequence[int]
) -> FleetRecord:
    """Instances with so many foreign requests and so many queued prefill tokens each."""
    fleet = await found_fleet(client, names=[f"i{n}" for n in range(len(batches))])
    router = RouterId("background")
    await functions.run(client, reservations.register(fleet.fleet_id, router, begin=True))
    for slot, (batch, queue) in enumerate(zip(batches, queues, strict=True)):
        await report(client, fleet, slot, running=batch, waiting=0)
        row = np.array([(slot, 1, queue)], reservations.CANDIDATE)
        await functions.run(client, reservations.reserve(fleet.fleet_id, router, slot + 1, row))
    return fleet


def oracle(
    batches: Sequence[int], queues: Sequence[int], count: int, *, knows: bool
) -> Counter[int]:
    """One request after the other by the product score; `knows`: each one's blocks at once.

    The background's reservation is one request more on each instance.
    """
    batch, queued = [b + 1 for b in batches], list(queues)
    new = [len(LONG)] * len(batch)
    for _ in range(count):
        scores = [(q + n) * (b + 1) for q, n, b in zip(queued, new, batch, strict=True)]
        assert scores.count(min(scores)) == 1, "a tie: another scenario is needed"
        best = scores.index(min(scores))
        queued[best] += new[best]
        batch[best] += 1
        if knows:
            new[best] = BLOCK
    return Counter({i: b - 1 - was for i, (b, was) in enumerate(zip(batch, batches, strict=True))})


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("credit", [True, False])
async def test_a_burst_is_placed_as_by_one_who_knows_each_earlier_ones_blocks(
    redis_client, redis_socket, seed, credit
) -> None:
    """32 equal new prompts through 4 routers; without the credit as by one who does not know."""
    rng = np.random.default_rng(seed)
    batches = rng.integers(0, 24, 8).tolist()
    queues = rng.integers(1, 30_000, 8).tolist()
    known, unknown = (oracle(batches, queues, 32, knows=knows) for knows in (True, False))
    assert known != unknown, "a scenario in which it makes no difference"

    fleet = await loaded_fleet(redis_client, batches, queues)
    async with four(redis_socket, in_flight_credit=credit) as routers:
        booked = await burst(routers, 32)
        placed = Counter(decision.slot for decision, _ in booked)
        assert placed == +(known if credit else unknown)

        # Decision records, Redis and the routers' own books say the same.
        tokens: Counter[int] = Counter()
        for decision, _ in booked:
            tokens[decision.slot] += decision.new_prefill_tokens
            assert decision.hit_tokens + decision.new_prefill_tokens == len(LONG)
        after = await reserved(redis_client, fleet)
        assert [queue + tokens[slot] for slot, queue in enumerate(queues)] == [t for _, t in after]
        own = sum(
            e.prefill_tokens
            for r in routers
            for b in r.ledger._books.values()
            for e in b.entries.values()
        )
        assert own == sum(tokens.values())
    assert [tokens for _, tokens in await reserved(redis_client, fleet)] == queues


async def test_any_policy_learns_of_siblings_by_the_time_it_books(
    redis_client, redis_socket
) -> None:
    """The most hits are where the first of the burst went, wherever the others looked."""
    await found_fleet(redis_client, names=[f"i{n}" for n in range(8)])
    async with four(redis_socket) as routers:
        booked = await burst(routers, 12, "max_hit")
    assert len({decision.slot for decision, _ in booked}) == 1
    assert Counter(decision.new_prefill_tokens for decision, _ in booked) == {
        len(LONG): 1,
        BLOCK: 11,
    }


async def test_prompts_that_share_a_prefix_are_siblings_up_to_there(
    redis_client, redis_socket
) -> None:
    """Another tail is the request's own, and a third prompt finds the second one's tail too."""
    await found_fleet(redis_client, names=["a"])
    tail = [9] * (32 * BLOCK)
    async with running(redis_socket, deadline_s=DEADLINE_S) as router:
        await router.decide(prompt=[*SHARED, *LONG])
        second, _ = await router.decide(prompt=[*SHARED, *tail])
        third, _ = await router.decide(prompt=[*SHARED, *tail, 1, 2, 3])
    assert (second.hit_tokens, second.in_flight_tokens) == (len(SHARED), len(SHARED))
    assert (third.hit_tokens, third.new_prefill_tokens) == (len(SHARED) + len(tail), 3)


async def test_hits_in_flight_are_whole_blocks_of_the_engine(redis_client, redis_socket) -> None:
    """An engine with larger blocks reuses fewer tokens of a sibling, as of its own cache."""
    fleet = await found_fleet(redis_client, names=[])
    record = make_instance("a", block_size_tokens=128).encode()
    await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, record))
    prompt = [3] * (30 * BLOCK)
    async with running(redis_socket, deadline_s=DEADLINE_S) as router:
        await router.decide(prompt=prompt)
        decision, _ = await router.decide(prompt=prompt)
    assert (decision.hit_tokens, decision.in_flight_tokens) == (384, 384)


@pytest.mark.parametrize("end", ["released", "prefilled", "reaped", "passed on"])
async def test_a_request_that_is_not_in_prefill_any_more_gives_no_credit(
    redis_client, redis_socket, end
) -> None:
    """Its client has left, its blocks are the index's by now, its router died, its engine too."""
    fleet = await found_fleet(redis_client, names=["a"])
    async with running(redis_socket, deadline_s=DEADLINE_S) as router:
        _, booking = await router.decide(prompt=LONG)
        match end:
            case "released":
                router.ledger.release(booking)
            case "prefilled":
                router.ledger.prefilled(booking)
            case "reaped":
                (router_id,) = await redis_client.zrange(keys.routers(fleet.fleet_id), 0, -1)
                await functions.run(
                    redis_client, reservations.reap(fleet.fleet_id, RouterId(router_id.decode()))
                )
                # What its own books still have is gone as well: another router asks.
                router.ledger._books.clear()
            case _:
                await functions.run(redis_client, fleet_functions.close(fleet.fleet_id, 0, 1, -1))
                await functions.run(redis_client, fleet_functions.free(fleet.fleet_id, 0, 1))
                record = make_instance("a").encode()
                await functions.run(redis_client, fleet_functions.join(fleet.fleet_id, record))
        await until(router.ledger.settled, "settled")
        decision, _ = await router.decide(prompt=LONG)
    assert (decision.hit_tokens, decision.in_flight_tokens) == (0, 0)
