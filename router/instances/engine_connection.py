"""One connection to an engine.

A body is read with `read`, or passed on as it comes: then `data_received` writes what it gets to
the other side at once, and nobody is woken for it. What an asyncio stream or a client library does
between the two sockets costs more than everything else on the way of a token, and of what is left
the most is Python that has to be fetched into a cache again: `data_received` calls none of it.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from router.instances import vanishing
from router.instances.http_wire import (
    BREAK,
    HEAD_BYTES_MAX,
    SHORT_SIZES,
    AnswerHead,
    BadAnswer,
    ChunkedDecoder,
    Origin,
    chunk,
    parse_head,
)
from router.instances.wire import Wire

HELD_BYTES_MAX: Final = 256 * 1024
"""Of a body that nobody takes; then the engine's side is not read."""

SILENCE_LOOKS: Final = 4
"""How often is looked whether an engine is silent, in the time that it may be: chunks that are
passed on do not note when they came."""

NO_CHUNK: Final = -9
"""A size that no data has."""


class EngineGone(ConnectionResetError):  # noqa: N818 - named as what happened
    """The engine closed the connection before its answer was complete."""


class EngineUnreachable(ConnectionError):  # noqa: N818 - named as what happened
    """The engine took no connection."""


class ConnectTimedOut(TimeoutError):  # noqa: N818 - named as what happened
    """The engine took no connection in time."""


class EngineConnection(asyncio.Protocol):
    """One connection, one request at a time.

    Attributes:
        origin: whose.
        reused: a request has been answered on it before.
        began: a byte of the present answer is here.
        idle_since_s: the event loop's time at which it was put back.
        passed_bytes: of payload, passed on so far.
        said_s: the event loop's time at which bytes of a WebSocket went to the engine.
    """

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin = origin
        self.reused = False
        self.began = False
        self.idle_since_s = 0.0
        self.passed_bytes = 0
        self.said_s = 0.0
        self._loop = loop
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle
        self._waiter: asyncio.Future[None] | None = None
        self._busy = False
        self._large_body = False
        self._lost: Exception | None = None
        self._reset_answer(to_head=False, to_upgrade=False)

    def _reset_answer(self, *, to_head: bool, to_upgrade: bool) -> None:
        self._to_head, self._to_upgrade = to_head, to_upgrade
        self._head_bytes = b""
        self._head: AnswerHead | None = None
        self._decoder: ChunkedDecoder | None = None
        self._left_bytes: int | None = None
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._ended = False
        self._clean = True
        self._paused = False
        self._wire: Wire | None = None
        self._passing = False
        self._tail: deque[bytes] | None = None
        self._write: Callable[[bytes], object]
        self._keep: Callable[[bytes], None]
        self._heard_s = 0.0
        self._looked_bytes = 0
        self._silent = False
        self._full: Callable[[bool], None] | None = None
        self.began = False
        self.passed_bytes = 0

    # -- what the caller does ---------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, *, to_head: bool, to_upgrade: bool = False) -> None:
        """Hand over a request."""
        self._reset_answer(to_head=to_head, to_upgrade=to_upgrade)
        self._busy = True
        if self._lost is not None:
            return
        large_body = len(body) > vanishing.LARGE_BODY_BYTES
        if large_body != self._large_body:
            self._large_body = large_body
            vanishing.bear(self._transport.get_extra_info("socket"), large_body=large_body)
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    def say(self, data: bytes) -> None:
        """Send bytes of a WebSocket that has been opened."""
        self.said_s = self._loop.time()
        if not self._transport.is_closing():
            self._transport.write(data)

    def on_full(self, full: Callable[[bool], None]) -> None:
        """Be told, until the answer ends, when the engine takes no more, and when it does again."""
        self._full = full

    async def head(self) -> AnswerHead:
        """Status and headers of the answer.

        Raises:
            ConnectionError: the engine broke off, or does not speak HTTP/1.1.
        """
        while self._head is None:
            if self._lost is not None:
                raise self._why_lost()
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """The next piece of the body; empty at its end.

        Raises:
            ConnectionError: as `head`.
        """
        while not self._pieces:
            if self._ended:
                return b""
            if self._lost is not None:
                raise self._why_lost()
            await self._wait()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held_bytes = 0
        self._resume()
        return piece

    @property
    def passes(self) -> bool:
        """Whether the body comes in chunks, which another side can have as they are."""
        return self._decoder is not None

    async def pass_on(self, wire: Wire, tail: deque[bytes], idle_s: float) -> bool:
        """Send the rest of the body on until its end (true) or until the wire is full (false).

        Args:
            wire: where to.
            tail: gets the last payloads.
            idle_s: how long the engine may be silent.

        Raises:
            ConnectionError: as `head`.
            TimeoutError: the engine fell silent.
        """
        self._wire, self._tail = wire, tail
        self._write, self._keep = wire.send, tail.append
        wire.on_full(self._fill)
        self._heard_s, self._looked_bytes = self._loop.time(), self.passed_bytes
        if self._pieces:
            self._send_on(await self.read())
        self._passing = self._between_chunks()
        if wire.is_full:  # nobody tells again that it is
            self._pause()
        else:
            self._resume()
        self._silent = False
        self._look_later(idle_s)
        try:
            while not self._ended:
                if self._lost is not None:
                    raise self._why_lost()
                if self._silent:
                    raise TimeoutError
                if self._paused:
                    return False
                await self._wait()
        finally:
            wire.on_full(None)
            self._timer.cancel()
        return True

    def abort(self) -> None:
        """Close at once; the engine notices and stops."""
        self._lost = self._lost or EngineGone("closed here")
        self._transport.abort()

    @property
    def reusable(self) -> bool:
        """Whether the answer is complete and the connection good for another request."""
        return (
            self._ended
            and self._clean
            and self._lost is None
            and self._head is not None
            and self._head.keeps_alive
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    @property
    def fresh(self) -> bool:
        """Whether nothing has happened to it while it was idle."""
        return self._lost is None and not self._transport.is_closing()

    def put_back(self) -> None:
        """No request is on it any more."""
        self._resume()  # the last piece of the answer may have filled the other side
        self._busy, self.reused = False, True
        self._wire, self._tail, self._passing = None, None, False
        self.idle_since_s = self._loop.time()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _why_lost(self) -> Exception:
        """A new one each time: one that is kept would keep whoever it was raised to, for ever."""
        assert self._lost is not None
        return copy.copy(self._lost)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    # -- what the event loop does -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio. Where nothing tells a body's length, this is its end."""
        told = self._head is None or self._head.chunked or self._head.length_bytes is not None
        if exc is None and self._busy and not told:
            self._ended = True
        if isinstance(exc, TimeoutError):  # the kernel's; ours are about answers
            exc = EngineGone("the engine's host has vanished")
        if self._lost is None:
            self._lost = exc or EngineGone("the engine closed the connection")
        self._wake()

    def pause_writing(self) -> None:
        """See asyncio."""
        if self._full is not None:
            self._full(True)

    def resume_writing(self) -> None:
        """See asyncio."""
        if self._full is not None:
            self._full(False)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._passing:
            end = data.find(BREAK, 0, 5)
            size = SHORT_SIZES.get(data[:end], NO_CHUNK)
            if len(data) == end + 4 + size and data.endswith(BREAK):
                # Exactly one chunk, short and not the last one: what nearly every read brings.
                self._keep(data[end + 2 : -2])
                self.passed_bytes += size
                try:  # noqa: SIM105 - a context manager costs more than all of this
                    self._write(data)
                except RuntimeError:  # the client has gone, and its handler is cancelled
                    pass
                return
        self._heard_s = self._loop.time()
        if not self._busy:  # nobody has asked for anything
            self.abort()
            return
        self.began = True
        try:
            if self._head is None:
                data = self._take_head(data)
            if self._head is not None:
                self._take_body(data)
        except BadAnswer as error:
            self._lost = error
            self._transport.abort()
            self._wake()

    def _take_head(self, data: bytes) -> bytes:
        """What of the data is body already."""
        self._head_bytes += data
        while self._head is None:
            head, end, rest = self._head_bytes.partition(b"\r\n\r\n")
            if len(head) > HEAD_BYTES_MAX:  # where there is no end, all that has come
                raise BadAnswer("a head without end")
            if not end:
                return b""
            self._head_bytes = rest
            self._head = parse_head(head, to_head=self._to_head, to_upgrade=self._to_upgrade)
        self._head_bytes = b""
        self._decoder = ChunkedDecoder() if self._head.chunked else None
        self._left_bytes = self._head.length_bytes
        self._ended = self._left_bytes == 0
        self._wake()
        return rest

    def _take_body(self, data: bytes) -> None:
        if self._decoder is not None:
            payload = self._decoder.feed(data)
            self._ended, self._clean = self._decoder.ended, not self._decoder.surplus
        elif self._left_bytes is None:
            payload = data
        else:
            payload = data[: self._left_bytes]
            self._left_bytes -= len(payload)
            self._ended, self._clean = not self._left_bytes, len(payload) == len(data)
        self._passing = self._wire is not None and self._between_chunks()
        if payload and self._wire is not None:
            self._send_on(payload)
        elif payload:
            self._pieces.append(payload)
            self._held_bytes += len(payload)
            if self._held_bytes > HELD_BYTES_MAX:
                self._pause()
        if payload or self._ended:
            self._wake()

    def _send_on(self, payload: bytes) -> None:
        """Chunks that came cut or in numbers go on as one."""
        assert self._wire is not None
        assert self._tail is not None
        self._tail.append(payload)
        self.passed_bytes += len(payload)
        if self._wire.write(chunk(payload)):
            self._pause()

    def _fill(self) -> None:
        """The other side has become full."""
        self._pause()
        self._wake()

    def _between_chunks(self) -> bool:
        """Whether the next byte begins a chunk, which could go on as it is."""
        return self._decoder is not None and self._decoder.between_chunks

    def _check_silence(self, idle_s: float) -> None:
        """Look again until the engine has been silent for so long, and at most a quarter longer."""
        now_s = self._loop.time()
        if self.passed_bytes != self._looked_bytes:
            self._looked_bytes, self._heard_s = self.passed_bytes, now_s
        if now_s - self._heard_s < idle_s:
            self._look_later(idle_s)
        else:
            self._silent = True
            self._wake()

    def _look_later(self, idle_s: float) -> None:
        delay_s = idle_s / SILENCE_LOOKS
        self._timer = self._loop.call_later(delay_s, self._check_silence, idle_s)
