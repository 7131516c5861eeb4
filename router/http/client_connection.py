"""One connection of a client: how long and how large what comes before a body may be."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, cast

from aiohttp import web

from router import headers as names
from router import telemetry
from router.http.dialects import error_body

HEADER_BYTES_MAX: Final = 16 * 1024
"""Of one header, and of the request line."""

HEADERS_MAX: Final = 128

HEAD_BYTES_MAX: Final = 64 * 1024
"""Of a request line and its headers together, where they do not come in one piece."""

HEAD_TOO_LATE: Final = (408, "header-too-slow", "The request's headers did not arrive in time.")
HEAD_TOO_LARGE: Final = (431, "header-too-large", "The request's headers are too large together.")
FULL: Final = (503, "connections-full", "This router has as many connections as it may have.")
MALFORMED: Final = (400, "request-malformed", "The request is not well-formed HTTP.")

SERVER_ERROR_MIN: Final = 500


class Connections:
    """The connections of one port.

    Args:
        port: `public` or `admin`, for metrics.
        count_max: beyond, a connection is answered and closed.
        header_timeout_s: see `ClientConnection`.
    """

    def __init__(self, *, port: str, count_max: int, header_timeout_s: float) -> None:
        self._open: set[ClientConnection] = set()
        self._count_max = count_max
        self._gauge = telemetry.CONNECTIONS.labels(port=port)
        self.header_timeout_s = header_timeout_s

    def came(self, one: "ClientConnection") -> bool:
        """Count one; whether it may stay."""
        self._open.add(one)
        self._gauge.set(len(self._open))
        return len(self._open) <= self._count_max

    def went(self, one: "ClientConnection") -> None:
        """One is closed."""
        self._open.discard(one)
        self._gauge.set(len(self._open))

    def end(self) -> None:
        """No further request on any; those without one are closed."""
        for one in tuple(self._open):
            one.end()

    @property
    def busy(self) -> bool:
        """Whether a request, or a part of an answer, is still on its way in one of them."""
        return any(one.busy for one in self._open)


class ClientConnection(web.RequestHandler):
    """aiohttp's handler of a connection, and what it leaves open.

    A head that has begun must be complete within `header_timeout_s`, the first one within that of
    the connection itself. aiohttp bounds single headers, waits between requests, and how far it
    reads ahead.

    Attributes:
        full: called when the client begins to read more slowly than its answer comes.
    """

    __slots__ = ("_connections", "_head_bytes", "_head_number", "_head_timer", "_socket", "full")

    def __init__(self, manager: web.Server, *, connections: Connections, **options: Any) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **options)
        self._connections = connections
        self.full: Callable[[], None] | None = None
        self._head_bytes = 0
        self._head_number = -1
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it, or answer that there are too many."""
        # uvloop's transports are not of asyncio's classes.
        self._socket = cast("asyncio.WriteTransport", transport)
        if self._connections.came(self):
            super().connection_made(transport)
            self._begin_head()
            return
        telemetry.CONNECTION_REFUSALS.labels(cause="full").inc()
        self._socket.write(_answer(*FULL, retry_after_s=1))
        self._socket.close()

    def end(self) -> None:
        """Take no further request; close at once where none is here."""
        idle = self._idle
        self.close()
        if idle:
            self.force_close()

    @property
    def busy(self) -> bool:
        """Whether a request is here, or a part of an answer that has not been sent yet."""
        handler = self._task_handler
        handles = handler is not None and not handler.done() and not self._idle
        return handles or self._socket.get_write_buffer_size() > 0

    @property
    def _idle(self) -> bool:
        waiter = self._waiter
        return waiter is not None and not waiter.done()

    def pause_writing(self) -> None:
        """See asyncio."""
        super().pause_writing()
        if self.full is not None:
            self.full()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._connections.went(self)
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, or of a body."""
        super().data_received(data)
        if not self._idle:  # a request is here; its body has bounds of its own
            return
        if self._head_timer is None or self._head_number != self._request_count:
            self._begin_head()
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse("malformed", *HEAD_TOO_LARGE)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP as everything else is answered, without quoting it."""
        del exc, message
        if status >= SERVER_ERROR_MIN:
            telemetry.INTERNAL_ERRORS.inc()
            code, said = "internal-error", "The router failed. This is a defect of it."
        else:
            telemetry.CONNECTION_REFUSALS.labels(cause="malformed").inc()
            _, code, said = MALFORMED
        response = web.json_response(
            error_body(request.path, status, said, code),
            status=status,
            headers={names.REASON: code},
        )
        response.force_close()
        return response

    def _begin_head(self) -> None:
        self._end_head()
        self._head_number, self._head_bytes = self._request_count, 0
        self._head_timer = self._loop.call_later(
            self._connections.header_timeout_s, self._head_late
        )

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._head_number == self._request_count:
            self._refuse("slow_headers", *HEAD_TOO_LATE)

    def _refuse(self, cause: str, status: int, code: str, said: str) -> None:
        transport = self.transport
        if transport is None:
            return
        telemetry.CONNECTION_REFUSALS.labels(cause=cause).inc()
        transport.write(_answer(status, code, said))
        self.force_close()


_REASONS: Final = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def _answer(status: int, code: str, said: str, *, retry_after_s: int | None = None) -> bytes:
    """A whole answer, for where there is no request to answer."""
    body = json.dumps(error_body("", status, said, code)).encode()
    retry = "" if retry_after_s is None else f"Retry-After: {retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n{names.REASON}: {code}\r\n{retry}Connection: close\r\n\r\n"
    )
    return head.encode() + body
