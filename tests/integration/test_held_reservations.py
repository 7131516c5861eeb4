"""Reservations over HTTP, for requests that somebody else sends."""

import aiohttp
import pytest
from fleets import reserved
from router_edge import PROMPT, Edge, FakeEngine, completion, edge, plain
from waiting import until_equal

pytestmark = pytest.mark.integration

ADMIN = "an-admin-key-of-tests"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}
PATH = "/admin/reservations"


async def _reserve(one: Edge, **query: str) -> dict:
    async with one.client.post(PATH, json=completion(), headers=AS_ADMIN, params=query) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def _call(one: Edge, method: str, path: str) -> tuple[int, str | None]:
    async with one.client.request(method, PATH + path, headers=AS_ADMIN) as answer:
        return answer.status, answer.headers.get("x-timestable-reason")


async def test_what_is_reserved_counts_until_it_is_released(redis_client, redis_socket) -> None:
    """Prefill share first, then the request; every next one sees it; nothing is sent."""
    a, b = FakeEngine("a", plain), FakeEngine("b", plain)
    async with edge(redis_client, redis_socket, a, b, admin_key=ADMIN) as one:

        async def booked() -> list[tuple[int, int]]:
            return sorted(await reserved(redis_client, one.fleet))

        first, second = await _reserve(one), await _reserve(one)
        assert {first["instance"], second["instance"]} == {"a", "b"}
        assert {first["url"], second["url"]} == {a.url, b.url}
        assert (first["hit_tokens"], first["data_parallel_rank"]) == (0, None)
        assert await booked() == [(1, len(PROMPT))] * 2
        name = f"/{first['reservation']}"
        for _ in range(2):
            assert await _call(one, "POST", f"{name}/prefilled") == (200, None)
        await until_equal([(1, 0), (1, len(PROMPT))], booked)
        third = await _reserve(one)
        assert third["instance"] == first["instance"]
        for held in (first, second, third):
            assert await _call(one, "DELETE", f"/{held['reservation']}") == (200, None)
        await until_equal([(0, 0)] * 2, booked)
        for method, path in (("DELETE", name), ("POST", f"{name}/prefilled")):
            assert await _call(one, method, path) == (404, "reservation-unknown")
    assert a.bodies == b.bodies == []


async def test_what_nobody_releases_ends_in_time(redis_client, redis_socket) -> None:
    """Whoever asked may have died."""
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), admin_key=ADMIN) as one:
        held = await _reserve(one, hold_s="0.05")

        async def known() -> int:
            return (await _call(one, "POST", f"/{held['reservation']}/prefilled"))[0]

        assert held["hold_s"] == 0.05
        await until_equal(404, known)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_a_router_that_ends_gives_back_what_it_holds(redis_client, redis_socket) -> None:
    """The reservation is in its book, like those of its own requests."""
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), admin_key=ADMIN) as one:
        await _reserve(one)
        fleet = one.fleet
    assert await reserved(redis_client, fleet) == [(0, 0)]


@pytest.mark.parametrize("hold_s", ["0", "-1", "nan", "inf", "1e9", "soon"])
async def test_a_bad_length_is_named(redis_client, redis_socket, hold_s: str) -> None:
    """Nothing is reserved for it."""
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), admin_key=ADMIN) as one:
        params = {"hold_s": hold_s}
        async with one.client.post(
            PATH, json=completion(), headers=AS_ADMIN, params=params
        ) as answer:
            said = (await answer.json())["error"]
        assert (answer.status, said["param"]) == (400, "hold_s")
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_as_many_as_may_be(redis_client, redis_socket, monkeypatch) -> None:
    """A caller that never releases cannot fill the books."""
    monkeypatch.setattr("router.http.reservations.HELD_MAX", 1)
    async with edge(redis_client, redis_socket, FakeEngine("a", plain), admin_key=ADMIN) as one:
        await _reserve(one)
        async with one.client.post(PATH, json=completion(), headers=AS_ADMIN) as answer:
            seen = answer.status, answer.headers["x-timestable-reason"]
        assert (*seen, answer.headers["Retry-After"]) == (429, "overloaded", "1")


async def test_reservations_are_operators(redis_client, redis_socket) -> None:
    """They move everybody's requests; without an admin key they are made on the admin port."""
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine, admin_port=0) as one:
        async with one.client.post(PATH, json=completion()) as answer:
            assert answer.status == 403
        url = f"http://127.0.0.1:{one.process.listeners.admin_port}"
        async with (
            aiohttp.ClientSession(url) as operator,
            operator.post(PATH, json=completion()) as answer,
        ):
            assert (answer.status, (await answer.json())["instance"]) == (200, "a")
