"""WebSockets through the router: bytes in both directions, booked for as long as they are open."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from fleets import reserved
from listening import listening
from raw_engine import RawEngine, connection, headers_of
from router_edge import Edge, edge
from waiting import until, until_equal

from router.door.visitor import digest_of

pytestmark = pytest.mark.integration

PATH = "/v1/realtime?model=m&intent=transcription"
LARGE = bytes(range(256)) * 8192
"""Two megabytes: many reads, and more than any buffer on the way."""

MUCH_BYTES = 64 << 20
"""More than the sockets on the way hold."""


@dataclass
class TalkingEngine:
    """Speaks first, as vLLM does, and says everything back.

    Attributes:
        name: its instance id.
        asked: requests that opened a WebSocket.
        open: WebSockets that are.
        closed: those that have ended.
        hang_up: set to end them as a killed engine does.
    """

    name: str
    asked: list[web.Request] = field(default_factory=list)
    open: int = 0
    closed: int = 0
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["TalkingEngine"]:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_get("/v1/realtime", self._talk)
        async with listening(app, cancels=True) as self.url:
            yield self

    async def _talk(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        socket = web.WebSocketResponse(protocols=("realtime",), max_msg_size=0)
        await socket.prepare(request)
        self.open += 1
        try:
            await socket.send_str('{"type":"session.created"}')
            async with asyncio.TaskGroup() as tasks:
                gone = tasks.create_task(self._hang_up(request))
                async for message in socket:
                    if message.type is WSMsgType.TEXT:
                        await socket.send_str(message.data)
                    else:
                        await socket.send_bytes(message.data)
                gone.cancel()
        finally:
            self.open -= 1
            self.closed += 1
        return socket

    async def _hang_up(self, request: web.Request) -> None:
        await self.hang_up.wait()
        assert request.transport is not None
        request.transport.abort()


@dataclass
class ByteEngine:
    """Does with each connection what it is told; its instance id is `a`."""

    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    name: str = "a"
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ByteEngine"]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await self.serve(reader, writer)
        finally:
            writer.close()


OPENING = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
)
AGREED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: y\r\n\r\n"
)


@asynccontextmanager
async def talking(one: Edge, **options: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A WebSocket that the engine has greeted on."""
    opening = one.client.ws_connect(PATH, max_msg_size=0, **options)
    async with asyncio.timeout(5), opening as socket:
        assert json.loads(await socket.receive_str()) == {"type": "session.created"}
        yield socket


async def test_both_sides_speak_and_the_session_is_booked(redis_client, redis_socket) -> None:
    """Texts, bytes, sizes, what was agreed on and the closing handshake; one request in the books.

    Its headers and its query reach the engine as those of any request.
    """
    engine = TalkingEngine("a")
    headers = {"Authorization": "Bearer k", "X-One": "1", "x-request-id": "r-1"}
    async with edge(redis_client, redis_socket, engine) as one:
        async with talking(one, headers=headers, protocols=("realtime",), compress=15) as socket:
            assert (socket.protocol, socket.compress) == ("realtime", 15)
            await socket.send_str("h\xe9")
            assert await socket.receive_str() == "h\xe9"
            await socket.send_bytes(LARGE)
            assert await socket.receive_bytes() == LARGE
            await until_equal([(1, 0)], lambda: reserved(redis_client, one.fleet))
        assert socket.close_code == aiohttp.WSCloseCode.OK
        await one.settled()
        await until_equal([(0, 0)], lambda: reserved(redis_client, one.fleet))
        assert (engine.open, engine.closed) == (0, 1)
    [asked] = engine.asked
    assert asked.path_qs == PATH
    for name, value in headers.items():
        assert asked.headers[name] == value


async def test_who_leaves_is_noticed_at_once_on_the_other_side(redis_client, redis_socket) -> None:
    """A client that is cut off ends its session at the engine, an engine its client's."""
    engine = TalkingEngine("a")
    async with edge(redis_client, redis_socket, engine) as one:
        async with talking(one) as socket:
            cut = socket.get_extra_info("socket")
            cut.shutdown(2)
            await until(lambda: (engine.open, engine.closed) == (0, 1), "the engine knows", 2.0)
        async with talking(one) as socket:
            engine.hang_up.set()
            message = await socket.receive()
            assert message.type in {WSMsgType.CLOSED, WSMsgType.CLOSE, WSMsgType.ERROR}
        await one.settled()
        await until_equal([(0, 0)], lambda: reserved(redis_client, one.fleet))


async def test_an_engine_that_does_not_agree_answers_for_itself(redis_client, redis_socket) -> None:
    """Its answer passes, and the connection is good for another request; so for a refusal here."""
    engine = RawEngine("a", pieces=[b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope"])
    async with edge(redis_client, redis_socket, engine) as one:
        for path in (PATH, "/v1/realtime?model=z"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await one.client.ws_connect(path)
            assert refused.value.status == 404
        port = one.process.listeners.port
        head = (
            f"GET {PATH} HTTP/1.1\r\nHost: r\r\nConnection: keep-alive, Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
        ).encode()
        async with connection(port) as (reader, writer), asyncio.timeout(5):
            for _ in range(2):
                writer.write(head)
                answer = await reader.readuntil(b"\r\n\r\nnope")
                assert answer.startswith(b"HTTP/1.1 404 ")
    assert len(engine.requests) == 3
    assert ("Upgrade", "websocket") in headers_of(engine.requests[-1][0])
    assert ("Connection", "Upgrade") in headers_of(engine.requests[-1][0])


async def test_before_it_is_open_another_instance_is_asked(redis_client, redis_socket) -> None:
    """One that hangs up costs the client nothing."""

    async def hangs_up(*_: object) -> None:
        pass

    gone, engine = ByteEngine(hangs_up), TalkingEngine("b")
    async with edge(redis_client, redis_socket, gone, engine) as one:
        for _ in range(2):  # whichever is chosen first
            async with talking(one) as socket:
                await socket.send_str("x")
                assert await socket.receive_str() == "x"


async def test_what_a_client_says_too_early_reaches_the_engine_in_order(
    redis_client, redis_socket
) -> None:
    """Bytes that came before the engine had agreed, and those after it, and its own as they are."""
    heard, asked, may_agree = asyncio.Queue[bytes](), asyncio.Event(), asyncio.Event()

    async def engine_side(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await may_agree.wait()
        writer.write(AGREED + b"\x81\x02hi")
        while data := await reader.read(100):
            heard.put_nowait(data)

    async with (
        edge(redis_client, redis_socket, ByteEngine(engine_side)) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(5),
    ):
        writer.write(OPENING + b"early")
        await until(asked.is_set, "the engine is asked")  # so the router has it all
        may_agree.set()
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert ("Sec-WebSocket-Accept", "y") in headers_of(answer)
        assert await reader.readexactly(4) == b"\x81\x02hi"
        writer.write(b", late")
        said = b""
        while said != b"early, late":
            said += await heard.get()


async def test_an_engine_that_does_not_listen_holds_its_client_back(
    redis_client, redis_socket
) -> None:
    """What a client says is not piled up here: it is not read while its engine takes no more."""
    done = asyncio.Event()

    async def deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED)
        await done.wait()

    async with (
        edge(redis_client, redis_socket, ByteEngine(deaf)) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(10),
    ):
        writer.write(OPENING)
        await reader.readuntil(b"\r\n\r\n")
        stuck, sent_bytes = False, 0
        while not stuck and sent_bytes < MUCH_BYTES:
            writer.write(LARGE)
            sent_bytes += len(LARGE)
            try:
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except TimeoutError:
                stuck = True
        assert stuck
        writer.transport.abort()
        done.set()


@pytest.mark.parametrize(
    ("models", "path", "status"),
    [
        (["m"], PATH, 101),
        (["m"], "/v1/realtime", 403),
        (["lora"], PATH, 403),
        (["lora"], "/v1/realtime?model=lora", 400),
        (["m"], "/v1/load_lora_adapter?model=m", 403),
        (["m"], "/v1/files?model=m", 403),
    ],
)
async def test_a_key_opens_what_it_is_for(
    redis_client, redis_socket, tmp_path: Path, *, models: list[str], path: str, status: int
) -> None:
    """By the model in the query; behind an adapter's name would be the model itself."""
    keys = tmp_path / "keys.jsonl"
    entry = {"name": "one", "sha256": digest_of("sk-key-of-a-client").hex(), "models": models}
    keys.write_text(json.dumps(entry))
    engine, headers = TalkingEngine("a"), {"Authorization": "Bearer sk-key-of-a-client"}
    async with edge(
        redis_client,
        redis_socket,
        engine,
        record={"adapters": ["lora"]},
        api_keys_file=str(keys),
    ) as one:
        if status == 101:
            async with one.client.ws_connect(path, headers=headers) as socket:
                assert await socket.receive_str()
        else:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await one.client.ws_connect(path, headers=headers)
            assert refused.value.status == status
    assert len(engine.asked) == (status == 101)


async def test_an_engine_that_resets_a_session_is_not_blamed(redis_client, redis_socket) -> None:
    """A client can bring it about: by talking on while its engine hangs up."""

    async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED)
        await reader.read(1)
        option = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        writer.transport.abort()

    async with (
        edge(redis_client, redis_socket, ByteEngine(resets), ejection_failures_min=1) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(5),
    ):
        writer.write(OPENING + b"xx")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.read() == b""
        await one.settled()
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert instances[0]["failures_in_a_row"] == 0


async def test_a_silent_session_ends_and_nobody_is_blamed(redis_client, redis_socket) -> None:
    """After the idle time on both sides; as long as one of them speaks it stays."""

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(AGREED)
        while await reader.read(100):
            pass

    config = {"idle_timeout_s": 0.4, "ejection_failures_min": 1}
    async with (
        edge(redis_client, redis_socket, ByteEngine(listens), **config) as one,
        connection(one.process.listeners.port) as (reader, writer),
        asyncio.timeout(5),
    ):
        writer.write(OPENING)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(6):
            writer.write(b"\x89\x00")
            await asyncio.sleep(0.1)
        assert one.process.admission.requests == 1
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        await one.settled()
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert instances[0]["failures_in_a_row"] == 0
