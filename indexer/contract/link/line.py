"""One open connection to one server: what was sent on it, and who waits for the answers.

Bytes go from the transport through hiredis straight to whoever waits: no task and no timer of its
own for any of them. Connecting, TLS and authentication are redis-py's and are over by now.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import DefaultParser
from redis.exceptions import BusyLoadingError, InvalidResponse, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

CLOSED = "Connection closed by server."


class Line(asyncio.Protocol):
    """Answers in order, until the connection breaks.

    Args:
        connection: redis-py's, past its handshake, with no answer outstanding; its transport is
            taken over, closing it is left to it.
        master_only: a server that answers READONLY is no longer the one to talk to.

    Attributes:
        ended: done once the connection is of no more use.
        failure: why.
    """

    def __init__(self, connection: Any, *, master_only: bool) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: BaseException | None = None
        self._master_only = master_only
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._heard_s = time.monotonic()
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=DefaultParser.parse_error,
        )
        # redis-py has no public way to its streams.
        stream, writer = connection._reader, connection._writer  # noqa: SLF001
        self._transport: asyncio.Transport = writer.transport
        self._transport.set_protocol(self)
        if self._transport.is_closing() or stream.at_eof():
            self._end(RedisConnectionError(CLOSED))  # which the stream was told, and not this

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, commands: Sequence[bytes]) -> list[asyncio.Future[Any]]:
        """Send packed commands; their answers, or errors, in order.

        Raises:
            ConnectionError: it has broken, and whoever owns it has not woken up yet.
        """
        if self.ended.done() or self._transport.is_closing():
            raise RedisConnectionError(CLOSED)
        loop, sent_s = asyncio.get_running_loop(), time.monotonic()
        futures = [loop.create_future() for _ in commands]
        self._waiting.extend([(future, sent_s) for future in futures])
        self._transport.write(commands[0] if len(commands) == 1 else b"".join(commands))
        return futures

    def waited_s(self) -> float:
        """For how long the oldest command has had no answer."""
        return time.monotonic() - self._waiting[0][1] if self._waiting else 0.0

    def stalled_s(self) -> float:
        """For how long nothing has come although something should have."""
        return min(self.waited_s(), time.monotonic() - self._heard_s)

    def fail(self, error: RedisError) -> None:
        """Tell everybody who still waits; nothing is sent any more."""
        while self._waiting:
            _refuse(self._waiting.popleft()[0], error)

    def abort(self) -> None:
        """Close at once: what was not taken must not be executed behind a later line's."""
        self._transport.abort()

    # -- what the transport tells -----------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Hand answers out."""
        self._heard_s = time.monotonic()
        self._replies.feed(data)
        try:
            while not self.ended.done():
                reply = self._replies.gets()
                if reply is False:  # not all of it has come; no answer is False in this protocol
                    return
                self._answer(reply)
        except (RedisError, IndexError) as error:  # IndexError: nobody has asked
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """It broke, or was closed."""
        self._end(exc or RedisConnectionError(CLOSED))

    def _answer(self, reply: Any) -> None:
        if isinstance(reply, RedisConnectionError) and not isinstance(reply, BusyLoadingError):
            raise reply  # it speaks of the connection, as when authentication is wanted
        future, _ = self._waiting.popleft()
        if isinstance(reply, RedisError):
            _refuse(future, reply)
            if self._master_only and isinstance(reply, ReadOnlyError):
                raise RedisConnectionError("the server is no longer the master") from reply
        elif not future.done():  # else the caller has stopped waiting
            future.set_result(reply)

    def _end(self, failure: BaseException) -> None:
        if not self.ended.done():
            self.failure = failure
            self.ended.set_result(None)


def _refuse(future: asyncio.Future[Any], error: RedisError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # the caller may have gone, or have been refused by an earlier answer
