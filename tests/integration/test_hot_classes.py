"""A prefix hotter than its holder: routers over one Redis agree on taking it out and back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from decision_core import RouterCore, running
from fleets import chain, found_fleet, report, store, until
from router_edge import Edge, FakeEngine, completion, edge, hang_up, stream_all

from indexer.contract import functions, request_classes
from indexer.contract.records import FleetRecord
from indexer.inspection import read_fleets

pytestmark = pytest.mark.integration

INSTANCES = 6
HOT = list(range(64))
"""Four blocks, held by slot 0."""

DEADLINE_S = 10.0


@contextlib.asynccontextmanager
async def two(
    client: redis.asyncio.Redis, socket: Path
) -> AsyncIterator[tuple[FleetRecord, RouterCore, RouterCore]]:
    """Two routers, and instances that are all busy but for the holder, who thus wins by load."""
    fleet = await found_fleet(client, names=[f"i{n}" for n in range(INSTANCES)])
    await store(client, fleet, 0, chain(fleet, HOT))
    for slot in range(1, INSTANCES):
        await report(client, fleet, slot, running=9, waiting=0)
    async with (
        running(socket, deadline_s=DEADLINE_S, detect_hot_prefixes=True) as one,
        running(socket, deadline_s=DEADLINE_S, detect_hot_prefixes=True) as other,
    ):
        for router in (one, other):
            await router.index.refresh()
        yield fleet, one, other


async def ask(router: RouterCore, prompt: list[int]) -> tuple[int, str | None]:
    """Where a request goes and how its class stands; it ends at once."""
    decision, booking = await router.decide(prompt=prompt)
    router.ledger.release(booking)
    await until(router.ledger.settled, "settled")
    return decision.slot, decision.hot_class and decision.hot_class.standing


async def warmed(*routers: RouterCore) -> None:
    """Forty requests, half of them hot: enough to judge by, from both routers."""
    for number in range(20):
        await ask(routers[number % 2], [*HOT, 1000 + number])
    for number in range(20):
        await ask(routers[number % 2], [5000 + number] * 40)


async def test_two_routers_take_a_class_out_and_back_together(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """The streak is of both routers' requests, either acts on it, either ends it.

    More than half of the requests, of six instances: five holders bear them, one does not.
    """
    async with two(redis_client, redis_socket) as (fleet, one, other):
        await warmed(one, other)
        assert await ask(one, [*HOT, 1]) == (0, "watched")
        assert await ask(other, [*HOT, 2]) == (0, "watched")
        for router in (one, other):  # after two requests in a row, one of each
            slot, standing = await ask(router, [*HOT, 3])
            assert standing == "taken_out"
            assert slot != 0
        (shown,) = (await read_fleets(one.link))[0]["classes"]["hot"]
        assert (shown["taken_out"], shown["streak"], shown["steered_requests"]) == (True, 2, 2)
        cold = [7] * 64
        assert (await ask(one, cold))[1] is None  # nobody else's business
        for slot in range(1, 5):
            await store(redis_client, fleet, slot, chain(fleet, HOT))
        assert await ask(other, [*HOT, 4]) == (0, "quiet")
        _, states = request_classes.class_states(
            await functions.run(redis_client, request_classes.classes(fleet.fleet_id))
        )
        assert states == []
        assert await ask(one, [*HOT, 5]) == (0, "quiet")


async def test_requests_at_once_through_both_routers_are_all_counted(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """No request is lost to another's, whoever books it."""
    async with two(redis_client, redis_socket) as (fleet, one, other):
        await asyncio.gather(*((one, other)[n % 2].decide(prompt=[*HOT, n]) for n in range(100)))
        requests, _ = request_classes.class_states(
            await functions.run(redis_client, request_classes.classes(fleet.fleet_id))
        )
        assert requests == pytest.approx(100, rel=0.2)  # a window may have ended meanwhile


@contextlib.asynccontextmanager
async def hot_edge(
    client: redis.asyncio.Redis, socket: Path, **config: object
) -> AsyncIterator[Edge]:
    """A router process in front of engines, the first of which holds the hot prefix."""
    engines = [FakeEngine(f"{chr(97 + n)}:1/0#x", stream_all) for n in range(INSTANCES)]
    async with edge(client, socket, *engines, policy="max_hit", **config) as one:
        await store(client, one.fleet, 0, chain(one.fleet, HOT))
        yield one


async def post(one: Edge, prompt: list[int], request_id: str = "x") -> None:
    """One request through HTTP."""
    headers = {"x-request-id": request_id}
    body = completion(prompt=prompt)
    async with one.client.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        await answer.read()


async def test_operators_see_the_class_its_requests_and_why(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """In `/fleet`, in the metrics, in the decision record, in words, and by `/route`."""
    async with hot_edge(redis_client, redis_socket, detect_hot_prefixes=True) as one:
        for number in range(40):
            await post(one, [5000 + number] * 40 if number % 2 else [*HOT, number])
        for number in range(3):
            await post(one, [*HOT, number], "steered")
        async with one.client.get("/decisions?request_id=steered") as answer:
            last = (await answer.json())["decisions"][0]
        assert last["hot_class"]["standing"] == "taken_out"
        assert last["hot_class"]["holders_count"] == 1
        assert last["hot_class"]["depth_blocks"] == 4
        assert "no candidates" in last["attempts"][0]["explanation"]
        assert last["instance_id"] != "a:1/0#x"

        async def shown() -> bool:
            async with one.client.get("/fleet") as answer:
                hot = (await answer.json())["fleets"][0]["classes"]["hot"]
            return [(s["depth_blocks"], s["taken_out"], s["holders"]) for s in hot] == [
                (4, True, 1)
            ]

        await until(shown, "the class is shown")
        async with one.client.get("/metrics") as answer:
            metrics = (await answer.text()).splitlines()
        assert 'timestable_router_hot_classes{fleet="m",standing="taken_out"} 1.0' in metrics
        steered = [m for m in metrics if m.startswith("timestable_router_steered_requests_total")]
        assert float(steered[0].split()[1]) >= 1
        async with one.client.post("/route", json=completion(prompt=[*HOT, 9])) as answer:
            assert (await answer.json())["hot_class"]["standing"] == "taken_out"


async def test_without_the_option_nothing_is_counted(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """No key of its own in Redis, no field in the view, and hits decide."""
    async with hot_edge(redis_client, redis_socket) as one:
        for number in range(3):
            await post(one, [*HOT, number])
        async with one.client.get("/fleet") as answer:
            assert "classes" not in (await answer.json())["fleets"][0]
        assert not await redis_client.keys("ts1:*:c:*")


async def test_a_retry_takes_whom_it_can_get(
    redis_client: redis.asyncio.Redis, redis_socket: Path
) -> None:
    """When the one without the prefix fails, the holder answers."""
    engines = [FakeEngine(f"{name}:1/0#x", stream_all) for name in "ab"]
    options = {"policy": "max_hit", "detect_hot_prefixes": True}
    async with edge(redis_client, redis_socket, *engines, **options) as one:
        await store(redis_client, one.fleet, 0, chain(one.fleet, HOT))
        for number in range(20):
            await post(one, [5000] * 40 if number % 4 == 0 else [*HOT, number])
        engines[1].script = hang_up
        await post(one, [*HOT, 1], "retried")
        async with one.client.get("/decisions?request_id=retried") as answer:
            (told,) = (await answer.json())["decisions"]
        tried = [attempt["instance_id"] for attempt in told["attempts"]]
        assert tried == ["b:1/0#x", "a:1/0#x"]
