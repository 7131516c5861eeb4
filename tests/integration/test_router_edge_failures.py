"""The router when instances fail, clients leave and operators stop it; over real sockets."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fleets import chain, reserved, store, until
from router_edge import (
    CHUNKS,
    LAST_CHUNKS,
    PROMPT,
    FakeEngine,
    broken_stream,
    completion,
    edge,
    failing,
    hang_up,
    one_chunk,
    silent,
    stream_all,
)

from router.instances.answer import Answer

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("script", [hang_up, failing(503)], ids=["hangs up", "answers 503"])
async def test_another_instance_is_asked_before_the_first_byte(
    redis_client, redis_socket, script
) -> None:
    """The client sees one good answer; both reservations are released."""
    bad, good = FakeEngine("bad", script), FakeEngine("good", stream_all)
    async with edge(redis_client, redis_socket, bad, good) as one:
        await store(redis_client, one.fleet, 0, chain(one.fleet, PROMPT)[:4])  # so bad is chosen
        async with one.client.post("/v1/completions", json=completion()) as answer:
            received = await answer.read()
        assert (answer.status, received) == (200, b"".join((*CHUNKS, *LAST_CHUNKS)))
        assert (answer.headers["x-timestable-instance"], len(bad.bodies)) == ("good", 1)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


async def test_instances_that_were_not_asked_for_are_not_tried_either(
    redis_client, redis_socket
) -> None:
    """The failure of those that were is the answer."""
    bad, good = FakeEngine("bad", hang_up), FakeEngine("good", stream_all)
    headers = {"x-timestable-instances": "bad"}
    async with (
        edge(redis_client, redis_socket, bad, good, allow_instance_choice=True) as one,
        one.client.post("/v1/completions", json=completion(), headers=headers) as answer,
    ):
        assert (answer.status, len(bad.bodies), good.bodies) == (502, 1, [])


async def test_a_dead_fleet_is_a_502_that_says_so(redis_client, redis_socket) -> None:
    """Every instance is tried once, then the failure is the answer."""
    engines = [FakeEngine(name, hang_up) for name in "abc"]
    async with edge(redis_client, redis_socket, *engines, retries_max=5) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, answer.headers["x-timestable-reason"]) == (502, "upstream-failed")
        assert (error["type"], answer.headers["Retry-After"]) == ("server_error", "1")
        assert [len(engine.bodies) for engine in engines] == [1, 1, 1]
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * 3


async def test_a_last_pushback_is_passed_on(redis_client, redis_socket) -> None:
    """When nobody is left to ask, the engine's own words are the answer."""
    async with (
        edge(redis_client, redis_socket, FakeEngine("a", failing(503))) as one,
        one.client.post("/v1/completions", json=completion()) as answer,
    ):
        assert (answer.status, await answer.json()) == (503, {"error": {"message": "no"}})


async def test_a_stream_that_breaks_ends_in_an_error_event(redis_client, redis_socket) -> None:
    """What came before stays; the client's parser meets an error, and the reservation ends."""
    engines = FakeEngine("a", broken_stream), FakeEngine("b", broken_stream)
    async with edge(redis_client, redis_socket, *engines) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            received = await answer.read()
        assert received.startswith(CHUNKS[0])
        event = json.loads(received.split(b"data: ")[-1])
        assert (event["error"]["code"], event["error"]["type"]) == (
            "upstream-failed",
            "server_error",
        )
        assert sorted(len(engine.bodies) for engine in engines) == [0, 1]  # no retry after a byte
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0), (0, 0)]


async def test_a_defect_in_mid_stream_breaks_the_connection(
    redis_client, redis_socket, monkeypatch
) -> None:
    """Never a second answer behind the first one; the reservation ends."""

    def defect(_: Answer) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Answer, "cached_tokens", defect)
    engine = FakeEngine("a", broken_stream)
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_a_first_byte_that_does_not_come_is_a_504(redis_client, redis_socket) -> None:
    """The instance had all the time there was: nobody else is asked, and it is told to stop."""
    engines = FakeEngine("a", silent), FakeEngine("b", silent)
    async with edge(redis_client, redis_socket, *engines, first_byte_timeout_s=0.2) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            await answer.read()
        assert (answer.status, answer.headers["x-timestable-reason"]) == (504, "upstream-timeout")
        assert sum(len(engine.bodies) for engine in engines) == 1
        asked = next(engine for engine in engines if engine.bodies)
        await asyncio.wait_for(asked.aborted.wait(), 5)


async def test_a_stream_that_falls_silent_ends_in_an_error_event(
    redis_client, redis_socket
) -> None:
    """The idle timeout is the only wait between two chunks."""
    engine = FakeEngine("a", one_chunk)
    async with edge(redis_client, redis_socket, engine, idle_timeout_s=0.2) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            received = await answer.read()
        assert b'"code": "upstream-timeout"' in received
        await asyncio.wait_for(engine.aborted.wait(), 5)


async def test_a_connection_that_the_engine_closed_is_not_a_failure(
    redis_client, redis_socket
) -> None:
    """A kept-alive connection that dies under a request is replaced, on the same instance."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine) as one:
        for _ in range(2):
            async with one.client.post("/v1/completions", json=completion()) as answer:
                await answer.read()
        assert len(engine.peers) == 1  # kept alive

        async def close_old(engine: FakeEngine, request: Any) -> Any:
            engine.script = stream_all
            return await hang_up(engine, request)

        engine.script = close_old
        async with one.client.post("/v1/completions", json=completion()) as answer:
            received = await answer.read()
        assert (answer.status, received) == (200, b"".join((*CHUNKS, *LAST_CHUNKS)))
        assert len(engine.peers) == 2


# -- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("script", [silent, one_chunk], ids=["in prefill", "in mid-stream"])
async def test_a_client_that_leaves_frees_the_instance(redis_client, redis_socket, script) -> None:
    """The engine's connection is closed at once and the reservation released."""
    engine = FakeEngine("a", script)
    async with edge(redis_client, redis_socket, engine) as one:
        request = asyncio.ensure_future(one.client.post("/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        if script is one_chunk:
            answer = await request
            assert await answer.content.readany() == CHUNKS[0]
            answer.close()
        else:
            request.cancel()
        await asyncio.wait_for(engine.aborted.wait(), 5)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_the_first_byte_ends_the_prefill(redis_client, redis_socket) -> None:
    """Its tokens are queued until then; the request itself is booked until the end."""
    engine = FakeEngine("a", silent)
    async with edge(redis_client, redis_socket, engine) as one:
        request = asyncio.ensure_future(one.client.post("/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        assert await reserved(redis_client, one.fleet) == [(1, 64)]
        engine.script = one_chunk
        engine.let_go.set()
        await (await request).read()
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


# -- bounds and the end ---------------------------------------------------------------------------


async def test_beyond_the_bound_is_a_429(redis_client, redis_socket) -> None:
    """The door refuses at once and says why."""
    engine = FakeEngine("a", silent)
    full = {"in_flight_requests_max": 1, "queue_requests_max": 0}
    async with edge(redis_client, redis_socket, engine, **full) as one:
        first = asyncio.ensure_future(one.client.post("/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        async with one.client.post("/v1/completions", json=completion()) as answer:
            await answer.read()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        engine.let_go.set()
        assert (await first).status == 200
        await (await first).read()


async def test_a_drain_finishes_streams_and_refuses_new_requests(
    redis_client, redis_socket
) -> None:
    """Not ready first; the running stream gets its end; whoever still comes is sent away."""
    engine = FakeEngine("a", silent)
    async with edge(redis_client, redis_socket, engine) as one, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(one.client.post("/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        async with one.client.get("/health") as answer:  # a second connection, kept alive
            assert answer.status == 200
        drain = tasks.create_task(one.drain(10.0))
        await until(lambda: one.process.admission._closed, "the door is closed")
        async with one.client.get("/ready") as answer:
            assert (answer.status, (await answer.json())["reason"]) == (503, "draining")
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert (answer.status, answer.headers["x-timestable-reason"]) == (503, "draining")
        assert not drain.done()
        engine.let_go.set()
        received = await (await running).read()
        assert received == b"".join((*CHUNKS, *LAST_CHUNKS))
        await asyncio.wait_for(drain, 5)
    assert await reserved(redis_client, one.fleet) == [(0, 0)]
