"""To the instance and back: bytes go through as they are, in both directions.

An answer is `open` once its first body byte is here. Until then nothing has reached the client, so
the caller may ask another instance; from then on `relay` passes on whatever comes, chunk by chunk.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Protocol, Self

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from yarl import URL

from indexer.contract.records import InstanceRecord
from router import headers as names
from router.errors import ClientGone, UpstreamFailed
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
}

TAIL_CHUNKS: Final = 4
"""Last chunks kept of an answer: usage and `[DONE]` of a stream come in the last one to three."""

_CACHED_TOKENS: Final = b'"cached_tokens":'
"""Inside generated text the quotes would be escaped, so this is found in usage alone."""

STALE_RETRIES_MAX: Final = 2
"""Kept-alive connections that the engine closed just before use, for one dispatch."""

IDLE_SLACK_RATIO: Final = 0.1
"""The idle deadline is moved only so often, not with every chunk, and fires that much later."""

_NETWORK: Final = (aiohttp.ClientError, OSError)


class Sink(Protocol):
    """Where an answer goes: the client's side of the request."""

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body.

        Raises:
            ClientGone: nobody is there to take it.
        """
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
        content: the rest of the body.
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
    content: aiohttp.StreamReader
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

    def cached_tokens(self) -> int | None:
        """What the engine says it found in its KV$, when usage came with the answer."""
        tail = b"".join(self.tail)
        at = tail.rfind(_CACHED_TOKENS)
        if at < 0:
            return None
        number = tail[at + len(_CACHED_TOKENS) :].lstrip()
        digits = number[: len(number) - len(number.lstrip(b"0123456789"))]
        return int(digits) if digits else None


@dataclass(slots=True)
class _Probe:
    """What is noted of one dispatch."""

    reused: bool = False
    sent_s: float = 0.0


class _Body(Payload):
    """A request body that notes when it was handed to its connection."""

    def __init__(self, body: bytes, probe: _Probe) -> None:
        super().__init__(body, content_type="application/json")
        self._size = len(body)
        self._autoclose = True
        self._probe = probe

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._value)
        self._probe.sent_s = time.monotonic()


class Upstream:
    """One pool of connections to all instances.

    The pool has no bound of its own, admission has one. Use as an async context manager.

    Args:
        connect_timeout_s: for a new connection.
        first_byte_timeout_s: from dispatch to the first body byte, queueing and prefill included.
        idle_timeout_s: between two chunks, and for a client that does not read.
        keepalive_s: an unused connection is closed after this; shorter than the engine's 5 s.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        first_byte_timeout_s: float,
        idle_timeout_s: float,
        keepalive_s: float,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._first_byte_timeout_s = first_byte_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._keepalive_s = keepalive_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        async def note_reuse(_: Any, context: Any, __: Any) -> None:
            context.trace_request_ctx.reused = True

        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            trace_configs=[trace],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def open(self, instance: InstanceRecord, call: ApiCall) -> AsyncIterator[Answer]:
        """Send the request on and wait for the first byte of the answer.

        Leaving the context early closes the connection, and the engine aborts the request.

        Raises:
            UpstreamFailed: before the first byte.
        """
        response = None
        try:
            try:
                async with asyncio.timeout(self._first_byte_timeout_s):
                    probe, response = await self._send(instance, call)
                    first = await response.content.readany()
            except TimeoutError as error:
                raise self._too_late(instance, error) from error
            except _NETWORK as error:
                raise _failed(instance, error, before_first_byte=True) from error
            yield Answer(
                instance=instance,
                status=response.status,
                headers=_end_to_end(response.headers.items(), _HOP_BY_HOP),
                first=first,
                sent_s=probe.sent_s,
                first_byte_s=time.monotonic(),
                content=response.content,
            )
        finally:
            if response is not None:
                response.close()  # changes nothing once the body has been read to its end

    async def _send(
        self, instance: InstanceRecord, call: ApiCall
    ) -> tuple[_Probe, aiohttp.ClientResponse]:
        """Dispatch; again where a kept-alive connection turns out to be closed already."""
        assert self._session is not None
        headers = _end_to_end(call.headers, _NOT_FORWARDED)
        headers.append((names.REQUEST_ID, call.request_id))
        if instance.data_parallel_rank is not None:
            headers.append((names.RANK, str(instance.data_parallel_rank)))
        url = _url(instance.url, call.endpoint)
        stale = 0
        while True:
            probe = _Probe()
            try:
                response = await self._session.post(
                    url,
                    data=_Body(call.body, probe),
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=probe,
                )
            except (aiohttp.ServerDisconnectedError, ConnectionResetError, aiohttp.ClientOSError):
                stale += 1
                if not probe.reused or stale > STALE_RETRIES_MAX:
                    raise
            else:
                return probe, response

    async def relay(self, answer: Answer, sink: Sink) -> None:
        """Pass the body on until its end.

        Raises:
            UpstreamFailed: the instance broke off or fell silent; the client has a part already.
            ClientGone: the client does not take it.
        """
        clock = time.monotonic  # the event loop's clock has a grain of 1 ms
        content, tail, write, idle_s = answer.content, answer.tail, sink.write, self._idle_timeout_s
        slack_s = idle_s * IDLE_SLACK_RATIO
        reading, moved_s, chunk = False, clock(), answer.first
        try:
            async with asyncio.timeout(idle_s + slack_s) as idle:
                while chunk:
                    await write(chunk)
                    reading, now_s = True, clock()
                    answer.first_out_s = answer.first_out_s or now_s
                    answer.output_bytes += len(chunk)
                    tail.append(chunk)
                    if now_s - moved_s > slack_s:
                        idle.reschedule(now_s + idle_s + slack_s)
                        moved_s = now_s
                    chunk = await content.readany()
                    reading = False
        except TimeoutError as error:
            if not reading:
                raise ClientGone(f"the client read nothing for {idle_s:g} s") from error
            raise UpstreamFailed(
                answer.instance.instance_id,
                f"The instance {answer.instance.instance_id} fell silent for {idle_s:g} s.",
                before_first_byte=False,
                timeout=True,
            ) from error
        except _NETWORK as error:
            raise _failed(answer.instance, error, before_first_byte=False) from error

    def _too_late(self, instance: InstanceRecord, error: TimeoutError) -> UpstreamFailed:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return UpstreamFailed(
                instance.instance_id,
                f"The instance {instance.instance_id} accepted no connection within "
                f"{self._connect_timeout_s:g} s.",
                before_first_byte=True,
            )
        return UpstreamFailed(
            instance.instance_id,
            f"The instance {instance.instance_id} sent nothing within "
            f"{self._first_byte_timeout_s:g} s. Send a shorter prompt, or try again later.",
            before_first_byte=True,
            timeout=True,
        )


def _failed(
    instance: InstanceRecord, error: Exception, *, before_first_byte: bool
) -> UpstreamFailed:
    what = "did not answer" if before_first_byte else "broke off its answer"
    return UpstreamFailed(
        instance.instance_id,
        f"The instance {instance.instance_id} {what} ({type(error).__name__}). Try again.",
        before_first_byte=before_first_byte,
    )


def _end_to_end(headers: Any, excluded: frozenset[str]) -> list[tuple[str, str]]:
    """Headers that concern the other end, without those that `Connection` names."""
    kept = [(name, value) for name, value in headers if name.lower() not in excluded]
    for name, value in headers:
        if name.lower() == "connection" and value.lower() not in {"keep-alive", "close"}:
            named = {token.strip().lower() for token in value.split(",")}
            kept = [header for header in kept if header[0].lower() not in named]
    return kept


@lru_cache(maxsize=4096)
def _url(base: str, path: str) -> URL:
    """Parsing costs more than anything else on the way of a small request."""
    return URL(base.rstrip("/") + path)
