"""To the instance and back: bytes go through as they are, in both directions.

An answer is `open` once its first body byte is here. Until then nothing has reached the client, so
the caller may ask another instance; from then on `relay` passes on whatever comes, chunk by chunk.
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, Self

from indexer.contract.records import InstanceRecord
from router import headers as names
from router import telemetry
from router.errors import ClientGone, UpstreamCause, UpstreamFailed
from router.instances.connections import Connections
from router.instances.engine_connection import (
    ConnectTimedOut,
    EngineConnection,
    EngineUnreachable,
    Wire,
)
from router.instances.http_wire import Origin, readable, request_head
from router.requests.api_call import ApiCall

EVENT_STREAM: Final = "text/event-stream"

_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_FORWARDED: Final = _HOP_BY_HOP | {
    "content-length",
    "expect",
    "host",
    names.RANK,
    names.REQUEST_ID,
    names.EXPLAIN,
    names.POLICY,
    names.PRIORITY,
}

TAIL_CHUNKS: Final = 4
"""Last chunks kept of an answer: usage and `[DONE]` of a stream come in the last one to three."""

END_BYTES: Final = 64

_CACHED_TOKENS: Final = (b'"cached_tokens":', b'"cache_read_input_tokens":')
"""OpenAI's name and Anthropic's; in generated text the quotes would be escaped."""

_OUTPUT_TOKENS: Final = (b'"completion_tokens":', b'"output_tokens":')
"""Likewise."""

STALE_RETRIES_MAX: Final = 2
"""Kept-alive connections that the engine closed just before use, for one dispatch."""

_BODYLESS: Final = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})
"""Methods whose requests need not have a body."""


class Sink(Protocol):
    """Where an answer goes: the client's side of the request."""

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body.

        Raises:
            ClientGone: nobody is there to take it.
        """
        ...

    def wire(self) -> Wire | None:
        """Where chunks can go as they come, once the answer has begun; None: through `write`."""
        ...


@dataclass(slots=True, kw_only=True)
class Answer:
    """An instance's answer whose first byte is here.

    Attributes:
        instance: who answers.
        status: HTTP status.
        headers: end-to-end headers, in order.
        first: the first chunk of the body; empty when there is none.
        sent_s: monotonic time at which the request was handed to the connection.
        first_byte_s: monotonic time of the first chunk.
        connection: brings the rest of the body.
        first_out_s: monotonic time at which the first chunk was passed on.
        output_bytes: passed on so far.
        tail: last chunks, for `cached_tokens`.
    """

    instance: InstanceRecord
    status: int
    headers: list[tuple[str, str]]
    first: bytes
    sent_s: float
    first_byte_s: float
    connection: EngineConnection
    first_out_s: float | None = None
    output_bytes: int = 0
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_CHUNKS))

    @property
    def event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            name.lower() == "content-type" and value.startswith(EVENT_STREAM)
            for name, value in self.headers
        )

    @property
    def encoded(self) -> bool:
        """Whether the body is compressed: what it says is not read here."""
        return any(name.lower() == "content-encoding" for name, _ in self.headers)

    def forget_length(self) -> None:
        """The body will be changed on its way, so a told length would be wrong."""
        self.headers = [pair for pair in self.headers if pair[0].lower() != "content-length"]

    def end(self) -> bytes:
        """Its last piece passed on, at least as long as the mark that ends a stream."""
        return b"".join(list(self.tail)[-2:])[-END_BYTES:]

    def cached_tokens(self) -> int | None:
        """What the engine says it found in its KV$, when usage came with the answer."""
        return self._last_number(_CACHED_TOKENS)

    def output_tokens(self) -> int | None:
        """What the engine says it has generated, when usage came with the answer."""
        return self._last_number(_OUTPUT_TOKENS)

    def _last_number(self, fields: tuple[bytes, ...]) -> int | None:
        tail = b"".join(self.tail)
        ends = (at + len(name) for name in fields if (at := tail.rfind(name)) >= 0)
        last = max(ends, default=None)
        if last is None:
            return None
        number = tail[last:].lstrip()
        digits = number[: len(number) - len(number.lstrip(b"0123456789"))]
        return int(digits) if digits else None


class Upstream:
    """One pool of connections to all instances. Use as an async context manager.

    Args:
        connect_timeout_s: for a new connection.
        first_byte_timeout_s: from dispatch to the first body byte, queueing and prefill included.
        idle_timeout_s: between two chunks, and for a client that does not read.
        keepalive_s: an unused connection is closed after this; shorter than the engine's 5 s.
        tls: how certificates of engines are checked; None: by the system's authorities.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._connections = Connections(
            connect_timeout_s=connect_timeout_s, keepalive_s=keepalive_s, tls=tls
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()

    @asynccontextmanager
    async def open(self, instance: InstanceRecord, call: ApiCall) -> AsyncIterator[Answer]:
        """Send the request on and wait for the first byte of the answer.

        Leaving the context early closes the connection, and the engine aborts the request.

        Raises:
            UpstreamFailed: before the first byte.
        """
        dispatch = _Dispatch(self._connections, instance, call)
        try:
            try:
                async with asyncio.timeout(self._first_byte_timeout_s):
                    connection = await dispatch.sent()
                    head = await connection.head()
                    first = await connection.read()
            except TimeoutError as error:
                raise self._too_late(instance, error) from error
            except (OSError, ValueError) as error:
                raise _failed(instance, error, before_first_byte=True) from error
            yield Answer(
                instance=instance,
                status=head.status,
                headers=readable(_end_to_end(head.headers, _HOP_BY_HOP)),
                first=first,
                sent_s=dispatch.sent_s,
                first_byte_s=time.monotonic(),
                connection=connection,
            )
        finally:
            dispatch.end()

    async def relay(self, answer: Answer, sink: Sink) -> None:
        """Pass the body on until its end.

        Raises:
            UpstreamFailed: the instance broke off or fell silent; the client has a part already.
            ClientGone: the client does not take it.
        """
        try:
            if answer.first:
                await self._write(answer, answer.first, sink)
                answer.first_out_s = time.monotonic()
            wire = sink.wire() if answer.connection.passes else None
            if wire is None:
                await self._relay_pieces(answer, sink)
            else:
                await self._pass_on(answer, wire)
        except _Silent as error:
            raise UpstreamFailed(
                answer.instance.instance_id,
                f"The instance {answer.instance.instance_id} fell silent for "
                f"{self._idle_timeout_s:g} s.",
                before_first_byte=False,
                cause=UpstreamCause.IDLE_TIMEOUT,
            ) from error
        except OSError as error:
            raise _failed(answer.instance, error, before_first_byte=False) from error

    async def _relay_pieces(self, answer: Answer, sink: Sink) -> None:
        """Bodies that have to be framed anew, or looked into on their way."""
        while True:
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    piece = await answer.connection.read()
            except TimeoutError as error:
                raise _Silent from error
            if not piece:
                return
            await self._write(answer, piece, sink)

    async def _write(self, answer: Answer, piece: bytes, sink: Sink) -> None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await sink.write(piece)
        except TimeoutError as error:
            raise self._unread() from error
        answer.output_bytes += len(piece)
        answer.tail.append(piece)

    async def _pass_on(self, answer: Answer, wire: Wire) -> None:
        """Bodies that go through as they are, without waking this task for each chunk."""
        connection, before = answer.connection, answer.output_bytes
        try:
            while True:
                try:
                    ended = await connection.pass_on(wire, answer.tail, self._idle_timeout_s)
                except TimeoutError as error:
                    raise _Silent from error
                if ended:
                    return
                try:
                    async with asyncio.timeout(self._idle_timeout_s):
                        await wire.drain()
                except TimeoutError as error:
                    raise self._unread() from error
        finally:
            answer.output_bytes = before + connection.passed_bytes

    def _unread(self) -> ClientGone:
        return ClientGone(f"the client read nothing for {self._idle_timeout_s:g} s")

    def _too_late(self, instance: InstanceRecord, error: TimeoutError) -> UpstreamFailed:
        if isinstance(error, ConnectTimedOut):
            return UpstreamFailed(
                instance.instance_id,
                f"The instance {instance.instance_id} accepted no connection within "
                f"{self._connect_timeout_s:g} s.",
                before_first_byte=True,
                cause=UpstreamCause.CONNECT_TIMEOUT,
            )
        return UpstreamFailed(
            instance.instance_id,
            f"The instance {instance.instance_id} sent nothing within "
            f"{self._first_byte_timeout_s:g} s. Send a shorter prompt, or try again later.",
            before_first_byte=True,
            cause=UpstreamCause.FIRST_BYTE_TIMEOUT,
        )


class _Silent(Exception):  # noqa: N818 - never leaves this file
    """The instance sent nothing for too long."""


class _Dispatch:
    """One request on a connection; on another where a kept one turns out to be closed already."""

    def __init__(self, connections: Connections, instance: InstanceRecord, call: ApiCall) -> None:
        self.sent_s = time.monotonic()
        self._connections = connections
        self._call = call
        self._instance = instance
        self._connection: EngineConnection | None = None

    async def sent(self) -> EngineConnection:
        """The connection, when a byte of the answer is there or none will come.

        Raises:
            OSError, ValueError: no connection, or it broke.
        """
        call, origin = self._call, _origin(self._instance.url)
        headers = _end_to_end(call.headers, _NOT_FORWARDED)
        headers.append((names.REQUEST_ID, call.request_id))
        if self._instance.data_parallel_rank is not None:
            headers.append((names.RANK, str(self._instance.data_parallel_rank)))
        bodyless = not call.body and call.method in _BODYLESS
        length = None if bodyless else len(call.body)
        path = origin.prefix + call.path
        head = request_head(call.method, path, origin.authority, headers, length)
        for stale_retries_left in range(STALE_RETRIES_MAX, -1, -1):
            connection = self._connection = await self._connections.take(origin)
            connection.send(head, call.body, to_head=call.method == "HEAD")
            self.sent_s = time.monotonic()
            try:
                await connection.head()
            except OSError:
                stale = connection.reused and not connection.began
                if not stale or not stale_retries_left:
                    raise
                connection.abort()
                telemetry.STALE_CONNECTIONS.inc()
            else:
                break
        assert self._connection is not None
        return self._connection

    def end(self) -> None:
        """The connection is kept for others if its answer is complete, else closed."""
        if self._connection is not None:
            self._connections.give(self._connection)


def _failed(
    instance: InstanceRecord, error: Exception, *, before_first_byte: bool
) -> UpstreamFailed:
    what = "did not answer" if before_first_byte else "broke off its answer"
    return UpstreamFailed(
        instance.instance_id,
        f"The instance {instance.instance_id} {what} ({type(error).__name__}). Try again.",
        before_first_byte=before_first_byte,
        cause=_cause(error),
    )


def _cause(error: Exception) -> UpstreamCause:
    connecting = isinstance(error, EngineUnreachable | ValueError)
    return UpstreamCause.CONNECT if connecting else UpstreamCause.RESET


def _end_to_end(headers: Any, excluded: frozenset[str]) -> list[tuple[str, str]]:
    """Headers that concern the other end, without those that `Connection` names."""
    kept: list[tuple[str, str]] = []
    named: set[str] = set()
    for name, value in headers:
        lowered = name.lower()
        if lowered == "connection" and value.lower() not in {"keep-alive", "close"}:
            named |= {token.strip().lower() for token in value.split(",")}
        if lowered not in excluded:
            kept.append((name, value))
    return [pair for pair in kept if pair[0].lower() not in named] if named else kept


_origin = lru_cache(maxsize=4096)(Origin.of)
