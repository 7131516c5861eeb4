"""A proxy between the routers and one engine that can be told to misbehave."""

import asyncio
import socket
import struct
from collections import Counter
from contextlib import suppress
from enum import StrEnum
from typing import Any, Final, Self

import aiohttp
from aiohttp import web

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
CHUNKS_BEFORE_RESET: Final = 2
CONNECT_TIMEOUT_S: Final = 5.0
SHUTDOWN_S: Final = 1.0

_LINGER_NOT: Final = struct.pack("ii", 1, 0)
"""Closing a socket that lingers for no time sends a reset."""

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length"}
)


class Fault(StrEnum):
    """What happens to completions; everything else passes."""

    REFUSE = "refuse"  # nobody listens; concerns all requests
    RESET_BEFORE_FIRST_BYTE = "reset-before-first-byte"
    RESET_MID_STREAM = "reset-mid-stream"
    HANG = "hang"  # until the fault is lifted or the client leaves
    STATUS_400 = "400"
    STATUS_429 = "429"
    STATUS_500 = "500"
    STATUS_503 = "503"

    @property
    def status(self) -> int | None:
        """The HTTP status it answers with, if it is one that does."""
        return int(self.value) if self.value.isdigit() else None


class EngineProxy:
    """Passes requests to an engine, or does to them what `fault` says.

    Use as an async context manager.

    Args:
        target_url: base URL of the engine.
        host: address to listen on.
        port: port to listen on; 0 for any.

    Attributes:
        hits: requests a fault was done to.
        hit_ids: `x-request-id` of those, and of those under way when it begins to refuse.
    """

    def __init__(self, target_url: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._target_url = target_url
        self._host = host
        self._port = port
        self._fault: Fault | None = None
        self._lifted = asyncio.Event()
        self._site: web.TCPSite | None = None
        self.hits: Counter[Fault] = Counter()
        self.hit_ids: set[str] = set()
        self._under_way: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lifted.set()
        await self._runner.cleanup()
        await self._session.close()

    @property
    def url(self) -> str:
        """Base URL under which routers reach the engine."""
        return f"http://{self._host}:{self._port}"

    async def set_fault(self, fault: Fault | None) -> None:
        """Misbehave so from now on; None: pass everything."""
        self._lifted.set()
        self._lifted = asyncio.Event()
        self._fault = fault
        if fault is Fault.REFUSE and self._site is not None:
            await self._site.stop()
            self._site = None
            self.hit_ids |= set(+self._under_way)
            for connection in self._connections():
                _reset(connection)
        elif fault is not Fault.REFUSE and self._site is None:
            await self._listen()

    def _connections(self) -> list[asyncio.Transport]:
        server = self._runner.server
        handlers: list[Any] = server.connections if isinstance(server, web.Server) else []
        return [h.transport for h in handlers if isinstance(h.transport, asyncio.Transport)]

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, self._host, self._port, reuse_address=True)
        await self._site.start()
        self._port = self._runner.addresses[-1][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        request_id = request.headers.get("x-request-id", "")
        self._under_way[request_id] += 1
        try:
            return await self._answer(request)
        finally:
            self._under_way[request_id] -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        fault = self._fault if request.path.endswith("/completions") else None
        body = await request.read()
        if fault is not None:
            self.hits[fault] += 1
            self.hit_ids.add(request.headers.get("x-request-id", ""))
        if fault is not None and fault.status is not None:
            text = f"the proxy was told to answer {fault.value}"
            error = {"message": text, "type": "fault", "code": fault.status}
            return web.json_response({"error": error}, status=fault.status)
        if fault is Fault.HANG:
            await self._lifted.wait()
        elif fault is Fault.RESET_BEFORE_FIRST_BYTE:
            _reset(request.transport)
            raise ConnectionResetError
        return await self._pass(request, body, cut=fault is Fault.RESET_MID_STREAM)

    async def _pass(self, request: web.Request, body: bytes, *, cut: bool) -> web.StreamResponse:
        async with self._session.request(
            request.method,
            self._target_url + request.raw_path,
            data=body,
            headers=_end_to_end(request.headers),
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
            await response.prepare(request)
            count = 0
            with suppress(aiohttp.ClientPayloadError):
                async for chunk in answer.content.iter_any():
                    count += 1
                    await response.write(chunk)
                    if cut and count >= CHUNKS_BEFORE_RESET:
                        break
                else:
                    if not cut:
                        await response.write_eof()
                        return response
            _reset(request.transport)
            return response


def _end_to_end(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP]


def _reset(transport: asyncio.BaseTransport | None) -> None:
    """Close a connection so that the other side sees a reset."""
    if isinstance(transport, asyncio.Transport):
        connection = transport.get_extra_info("socket")
        if connection is not None:
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        transport.abort()
