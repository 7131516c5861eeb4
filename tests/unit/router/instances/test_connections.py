"""Connections to engines notice when a host is gone that says nothing any more."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from router.instances.connections import VANISHED_S, Connections
from router.instances.engine_connection import EngineConnection
from router.instances.http_wire import Origin


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
    """Probes while it is silent, and a bound on what it leaves unacknowledged."""
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


async def test_a_vanished_host_is_no_late_answer() -> None:
    """The kernel's timeout says that the connection is dead, as a reset does."""
    async with connected() as made:
        made.send(b"GET / HTTP/1.1\r\n\r\n", b"", to_head=False)
        made.connection_lost(TimeoutError(110, "Connection timed out"))
        with pytest.raises(ConnectionError, match="vanished"):
            await made.head()
