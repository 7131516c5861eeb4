"""What a router's drain does to whoever is in the middle of an answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fleets import reserved, until
from listening import listening
from raw_engine import DEADLINE_S, connection, post
from router_edge import (
    CHUNKS,
    LAST_CHUNKS,
    Edge,
    FakeEngine,
    completion,
    edge,
    one_chunk,
    silent,
    stream_all,
)
from waiting import until_equal

from router.http import listeners

pytestmark = pytest.mark.integration

LONG_S = 120.0
"""Of a wait that a test must not meet: it would be seen, however slow the machine is."""

SHORT_S = 0.3

LARGE = b'data: {"choices":[{"text":"%s"}]}\n\n' % (b"x" * 32768)
"""More than the sockets hold, and less than what holds up whoever writes."""

SOCKET_BYTES = 2048


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a connection that is over waits too long for its test."""
    monkeypatch.setattr(listeners, "SHUTDOWN_S", LONG_S)


@asynccontextmanager
async def draining(one: Edge, deadline_s: float) -> AsyncIterator[asyncio.Event]:
    """The router drains; gives what hurries it, and waits for its end."""
    hurry = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        drained = tasks.create_task(one.drain(deadline_s, hurry))
        await until(lambda: one.process.admission.draining, "it drains")
        yield hurry
        async with asyncio.timeout(DEADLINE_S):
            await drained


async def large(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A stream of one long event."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(LARGE + b"".join(LAST_CHUNKS))
    return response


class Talker:
    """An engine that greets on a WebSocket and hears it out; its instance id is `a`."""

    name = "a"
    url = ""
    closed = False

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Talker"]:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_get("/v1/realtime", self._talk)
        async with listening(app, cancels=True) as self.url:
            yield self

    async def _talk(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        try:
            await socket.send_str("hello")
            async for _ in socket:
                pass
        finally:
            self.closed = True
        return socket


async def test_who_ends_in_time_has_all_and_nobody_is_waited_for(
    redis_client, redis_socket
) -> None:
    """Neither for its connection, which might be used again, nor for another that is idle."""
    engine = FakeEngine("a", silent)
    async with (
        edge(redis_client, redis_socket, engine) as one,
        aiohttp.ClientSession(one.client._base_url) as other,
        asyncio.TaskGroup() as tasks,
    ):
        async with other.get("/health") as answer:
            assert answer.status == 200
        asked = tasks.create_task(one.client.post("/v1/completions", json=completion()))
        await until(lambda: engine.bodies, "the engine has the request")
        async with draining(one, LONG_S):
            engine.let_go.set()
            assert await (await asked).read() == b"".join((*CHUNKS, *LAST_CHUNKS))


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_stream_is_told_that_it_is_cut_off(redis_client, redis_socket, hurried) -> None:
    """At the deadline or the second signal, in an event; the engine stops, the books are empty."""
    engine = FakeEngine("a", one_chunk)
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.post("/v1/completions", json=completion()) as answer:
            assert await answer.content.readexactly(len(CHUNKS[0])) == CHUNKS[0]
            async with draining(one, LONG_S if hurried else SHORT_S) as hurry:
                if hurried:
                    hurry.set()
                rest = await answer.content.read()
        [event] = [line for line in rest.split(b"\n\n") if line]
        told = json.loads(event.removeprefix(b"data: "))
        assert (told["error"]["code"], told["error"]["type"]) == ("draining", "server_error")
        assert "drain_deadline_s" in told["error"]["message"]
        await until(engine.aborted.is_set, "the engine does not go on")
        await one.settled()
        await until_equal([(0, 0)], lambda: reserved(redis_client, one.fleet))


@pytest.mark.parametrize("changes", [{}, {"stream": False}])
async def test_who_has_no_byte_yet_is_sent_elsewhere(
    redis_client, redis_socket, changes: dict[str, Any]
) -> None:
    """As whoever comes too late: 503, to be repeated."""
    engine = FakeEngine("a", silent)
    async with (
        edge(redis_client, redis_socket, engine) as one,
        asyncio.TaskGroup() as tasks,
    ):
        asked = tasks.create_task(one.client.post("/v1/completions", json=completion(**changes)))
        await until(lambda: engine.bodies, "the engine has the request")
        async with draining(one, SHORT_S):
            answer = await asked
            assert (answer.status, answer.headers["x-timestable-reason"]) == (503, "draining")
            assert "Retry-After" in answer.headers
            assert (await answer.json())["error"]["code"] == "draining"


async def test_a_websocket_is_closed(redis_client, redis_socket) -> None:
    """On both sides, at the deadline."""
    engine = Talker()
    async with edge(redis_client, redis_socket, engine) as one:
        async with one.client.ws_connect("/v1/realtime?model=m") as socket:
            assert await socket.receive_str() == "hello"
            async with draining(one, SHORT_S):
                assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSED
                await until(lambda: engine.closed, "the engine is told")
        await one.settled()


async def test_a_body_that_is_not_here_yet_is_not_waited_for(redis_client, redis_socket) -> None:
    """A request that trickles in is in flight, and ends with the others."""
    async with edge(redis_client, redis_socket, FakeEngine("a", stream_all)) as one:
        request = post("/v1/completions", b"{}")
        async with connection(one.process.listeners.port) as (reader, writer):
            writer.write(request[:-1])
            await until(lambda: one.process.admission.requests, "it is in flight")
            async with draining(one, SHORT_S):
                async with asyncio.timeout(DEADLINE_S):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
                writer.write(request[-1:])


async def test_an_answer_is_over_when_its_client_can_have_it(redis_client, redis_socket) -> None:
    """A router that ended while it held a part of it would take that part along."""
    engine = FakeEngine("a", large)
    async with edge(redis_client, redis_socket, engine) as one:
        [site] = one.process.listeners._public.sites
        assert site._server is not None
        for listening_socket in site._server.sockets:  # type: ignore[attr-defined]
            listening_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setblocking(False)
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            await loop.sock_connect(slow, ("127.0.0.1", one.process.listeners.port))
            request = post("/v1/completions", json.dumps(completion()).encode())
            await loop.sock_sendall(slow, request)
            await until(lambda: engine.bodies, "the engine has the request")
            await until(lambda: not one.process.admission.requests, "all is handed over")
            async with asyncio.TaskGroup() as tasks:
                drained = tasks.create_task(one.drain(LONG_S))
                await asyncio.sleep(SHORT_S)
                assert not drained.done()
                received = b""
                while piece := await loop.sock_recv(slow, len(LARGE)):
                    received += piece
                async with asyncio.timeout(DEADLINE_S):
                    await drained
    answer = received.partition(b"\r\n\r\n")[2]
    assert (answer.count(b"x"), answer[-5:]) == (LARGE.count(b"x"), b"0\r\n\r\n")
