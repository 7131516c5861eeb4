"""A minimal streaming HTTP/1.1 client on asyncio protocols: one origin, many connections.

It exists for its cost, since the load generator shares its cores with the fleet it measures. On a
small two-core machine with uvloop a streamed chunk costs about 24 us of CPU in kernel and event
loop, whoever reads it; this client adds about 7 us, aiohttp's adds 22 us before anything looks at
the chunk. It does what a load generator needs and nothing else. It never sends a request twice: a
lost request is a result.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

from loadgen.errors import EndpointError
from loadgen.http_response import FramingError, Receiver, ResponseParser

IDLE_CONNECTION_S = 3.0  # vLLM closes after 5 s; reusing in that instant would lose a request


class ConnectionFailedError(Exception):
    """The connection could not be made, broke, or spoke no HTTP/1.1; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Scheme, host and port of a URL, and the path in front of every request's own."""

    scheme: str
    host: str
    port: int
    path_prefix: str

    @classmethod
    def parse(cls, url: str) -> Self:
        """The origin of a base URL, with or without a final `/v1`.

        Raises:
            EndpointError: with what a URL looks like.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as exc:
            raise EndpointError(f"not a URL: {url!r} ({exc})") from exc
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EndpointError(f"not a URL: {url!r}; expected one like http://127.0.0.1:8000")
        return cls(
            scheme=parts.scheme,
            host=parts.hostname,
            port=port or (443 if parts.scheme == "https" else 80),
            path_prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    __slots__ = ("_finished", "_parser", "_transport", "idle_since_s", "is_open")

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.is_open = True
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._finished: asyncio.Future[None] | None = None

    def exchange(self, request: bytes, receiver: Receiver) -> asyncio.Future[None]:
        """Send a request; the future ends with the answer or fails with what went wrong."""
        assert self._transport is not None
        assert self._parser is None, "one exchange at a time"
        self._parser = ResponseParser(receiver)
        self._finished = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._finished

    def close(self) -> None:
        """Close now, whatever is going on."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not an assert: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._parser is None:
            return
        if exc is None and self._parser.end_of_connection():
            self._finish(None)
        else:
            reason = exc or "the server closed the connection before the end of its answer"
            self._finish(ConnectionFailedError(f"disconnected: {reason}"))

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()  # bytes nobody asked for: the framing is lost
            return
        # uvloop's loop.time() has a grain of 1 ms; this is the same clock without it.
        now_s = time.monotonic()
        try:
            finished = self._parser.feed(data, now_s)
        except Exception as exc:  # noqa: BLE001  # request boundary: becomes the request's error
            self.close()
            self._finish(exc)
            return
        if finished:
            if not self._parser.keep_alive:
                self.close()
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        self._parser = None
        assert self._finished is not None
        if self._finished.done():  # the caller gave up
            return
        if error is None:
            self._finished.set_result(None)
        elif isinstance(error, FramingError):
            self._finished.set_exception(ConnectionFailedError(f"bad answer: {error}"))
        else:
            self._finished.set_exception(error)


class HttpClient:
    """Keep-alive connections to one origin; as many as there are requests in flight.

    Args:
        origin: where to.
        connect_timeout_s: deadline of connecting, TLS handshake included.
    """

    def __init__(self, origin: Origin, *, connect_timeout_s: float) -> None:
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None
        self._idle: deque[_Connection] = deque()

    async def request(
        self,
        method: str,
        path: str,
        *,
        receiver: Receiver,
        headers: Mapping[str, str],
        body: bytes = b"",
        on_send: Callable[[], None] = lambda: None,
    ) -> None:
        """One exchange. The deadline is the caller's; cancelling closes the connection.

        Args:
            method: e.g. "POST".
            path: with the leading slash; the origin's prefix comes in front.
            receiver: gets the answer.
            headers: besides host and content-length.
            body: whole.
            on_send: called the moment before connecting or, on an open connection, sending.

        Raises:
            ConnectionFailedError: see there; and whatever the receiver raises.
        """
        lines = [
            f"{method} {self._origin.path_prefix}{path} HTTP/1.1",
            f"host: {self._origin.authority}",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        request = "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body
        on_send()
        connection = self._take_idle() or await self._connect()
        try:
            await connection.exchange(request, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        """The open connection idle for the shortest time; stale ones are closed."""
        oldest_s = time.monotonic() - IDLE_CONNECTION_S
        while self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    _Connection, self._origin.host, self._origin.port, ssl=self._tls
                )
        except TimeoutError as exc:
            reason = f"connect: no connection within {self._connect_timeout_s} s"
            raise ConnectionFailedError(reason) from exc
        except (OSError, ssl.SSLError) as exc:
            raise ConnectionFailedError(f"connect: {exc}") from exc
        return connection
