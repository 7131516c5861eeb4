"""Connections to engines notice when a host is gone that says nothing any more."""

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from router.instances.connections import Connections
from router.instances.engine_connection import EngineConnection
from router.instances.http_wire import Origin
from router.instances.vanishing import LARGE_BODY_BYTES, STALLED_S, VANISHED_S


@asynccontextmanager
async def connected() -> AsyncIterator[EngineConnection]:
    """A connection to something that takes requests and never answers."""
    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    connections = Connections(connect_timeout_s=2.0, keepalive_s=4.0)
    async with server:
        made = await connections.take(Origin.of(f"http://{host}:{port}"))
        yield made
        made.abort()
        connections.close()
        async with asyncio.timeout(5.0):
            await closed.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels name these options differently")
async def test_the_kernel_watches_the_other_host() -> None:
    """Probes while it is silent, and a bound on what it leaves unacknowledged, longer for much."""
    async with connected() as made:
        transport = cast("asyncio.Transport", made._transport)
        watched: socket.socket = transport.get_extra_info("socket")
        assert watched.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, unread_ms = (
            watched.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        )
        assert 0 < idle_s + interval_s <= VANISHED_S
        assert unread_ms == VANISHED_S * 1000
        for body_bytes, silence_s in ((LARGE_BODY_BYTES + 1, STALLED_S), (1, VANISHED_S)):
            made.send(b"", b"x" * body_bytes, to_head=False)
            unread_ms = watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert unread_ms == silence_s * 1000


async def test_a_vanished_host_is_no_late_answer() -> None:
    """The kernel's timeout says that the connection is dead, as a reset does."""
    async with connected() as made:
        made.send(b"GET / HTTP/1.1\r\n\r\n", b"", to_head=False)
        made.connection_lost(TimeoutError(110, "Connection timed out"))
        with pytest.raises(ConnectionError, match="vanished"):
            await made.head()


async def test_a_connection_whose_client_was_slow_reads_its_next_answer() -> None:
    """Its last piece filled the client's side; nobody but the next request would read on."""

    class Full:
        """A client that takes nothing more."""

        def write(self, chunks: bytes) -> bool:
            return bool(chunks)

        is_full = False  # before

        @property
        def send(self) -> Callable[[bytes], object]:
            return self.write

        def on_full(self, full: Callable[[], None] | None) -> None:
            del full

        async def drain(self) -> None:
            raise AssertionError("the answer has ended")

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
            await writer.drain()
            await reader.readexactly(1)
            writer.write(b"1\r\nb\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    connections = Connections(connect_timeout_s=2.0, keepalive_s=4.0)
    origin = Origin.of(f"http://{host}:{port}")
    async with server, asyncio.timeout(5.0):
        for _ in range(2):
            made = await connections.take(origin)
            made.send(b"GET / HTTP/1.1\r\n\r\n", b"", to_head=False)
            assert (await made.head()).status == 200
            assert await made.read() == b"a"
            passing = asyncio.ensure_future(made.pass_on(Full(), deque(maxlen=4), 5.0))
            await asyncio.sleep(0)
            cast("asyncio.Transport", made._transport).write(b"x")
            assert await passing
            connections.give(made)
        connections.close()


async def test_a_failure_keeps_nobody_who_met_it() -> None:
    """Raised itself, what a connection died of would keep callers' frames and request bodies."""
    async with connected() as made:
        made.send(b"GET / HTTP/1.1\r\n\r\n", b"", to_head=False)
        made.connection_lost(ConnectionResetError("reset"))
        for _ in range(2):
            with pytest.raises(ConnectionResetError, match="reset"):
                await made.head()
        assert made._lost is not None
        assert made._lost.__traceback__ is None
