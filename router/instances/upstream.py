"""To the instance and back: bytes go through as they are, in both directions.

An answer is `open` once its first body byte is here. Until then nothing has reached the client, so
the caller may ask another instance; from then on `relay` passes on whatever comes, chunk by chunk.
"""

import asyncio
import ssl
import time
from typing import Protocol, Self

from indexer.contract.records import InstanceRecord
from indexer.contract.waits import Waits
from router.errors import ClientGone, UpstreamCause, UpstreamFailed
from router.instances.answer import Answer
from router.instances.connections import Connections
from router.instances.engine_connection import (
    ConnectTimedOut,
    EngineUnreachable,
)
from router.instances.http_wire import SWITCHING, readable
from router.instances.sending import HOP_BY_HOP, Sending, end_to_end
from router.instances.wire import Wire
from router.requests.api_call import ApiCall


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
        self._first_byte_waits = Waits(first_byte_timeout_s)
        self._idle_waits = Waits(idle_timeout_s)
        self._connections = Connections(
            connect_timeout_s=connect_timeout_s, keepalive_s=keepalive_s, tls=tls
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()

    async def open(self, instance: InstanceRecord, call: ApiCall) -> Answer:
        """Send the request on and wait for the first byte of the answer, which has to be closed.

        Raises:
            UpstreamFailed: before the first byte.
        """
        sending = Sending(self._connections, instance, call)
        opened = False
        try:
            with self._first_byte_waits.one():
                connection = await sending.sent()
                head = await connection.head()
                switched = head.status == SWITCHING  # either side may speak first
                first = b"" if switched else await connection.read()
            opened = True
        except TimeoutError as error:
            raise self._too_late(instance, error) from error
        except (OSError, ValueError) as error:
            raise _failed(instance, error, before_first_byte=True) from error
        finally:
            if not opened:
                sending.end()
        return Answer(
            instance=instance,
            status=head.status,
            headers=readable(end_to_end(head.headers, HOP_BY_HOP)),
            first=first,
            sent_s=sending.sent_s,
            first_byte_s=time.monotonic(),
            connection=connection,
        )

    def close(self, answer: Answer) -> None:
        """Keep the connection for others if the answer is complete.

        Else it is closed, and the engine aborts the request.
        """
        self._connections.give(answer.connection)

    async def collect(self, answer: Answer, bytes_max: int) -> bytes | None:
        """The whole body, which goes nowhere; None: it is longer, or cannot be read.

        Raises:
            UpstreamFailed: the instance broke off or fell silent.
        """
        body = bytearray()
        try:
            piece = answer.first
            while piece:
                body += piece
                answer.tail.append(piece)
                if len(body) > bytes_max:
                    return None
                with self._idle_waits.one():
                    piece = await answer.connection.read()
        except TimeoutError as error:
            raise self._too_late(answer.instance, error) from error
        except (OSError, ValueError) as error:
            raise _failed(answer.instance, error, before_first_byte=True) from error
        return None if answer.encoded else bytes(body)

    async def relay(self, answer: Answer, sink: Sink) -> None:
        """Pass the body on until its end, of a WebSocket what the engine says.

        Raises:
            UpstreamFailed: the instance broke off or fell silent; the client has a part already.
            ClientGone: the client does not take it.
        """
        try:
            if answer.first:
                await self._write(answer, answer.first, sink)
                answer.first_out_s = time.monotonic()
            passes = answer.connection.passes or answer.switched
            wire = sink.wire() if passes else None
            if answer.switched and wire is not None:
                await self._talk(answer, wire)
            elif wire is None:
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
                with self._idle_waits.one():
                    piece = await answer.connection.read()
            except TimeoutError as error:
                raise _Silent from error
            if not piece:
                return
            await self._write(answer, piece, sink)

    async def _write(self, answer: Answer, piece: bytes, sink: Sink) -> None:
        try:
            with self._idle_waits.one():
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
                    with self._idle_waits.one():
                        await wire.drain()
                except TimeoutError as error:
                    raise self._unread() from error
        finally:
            answer.output_bytes = before + connection.passed_bytes

    async def _talk(self, answer: Answer, wire: Wire) -> None:
        """One direction of a WebSocket; the other one needs no task. Who is silent is nobody.

        Nor is an engine to blame that breaks off: where a client talks on to one that has hung up
        the kernel says the same as of a dead one.
        """
        loop, connection = asyncio.get_running_loop(), answer.connection
        while True:
            try:
                with self._idle_waits.one():
                    piece = await connection.read()
            except TimeoutError as error:
                if loop.time() - connection.said_s < self._idle_timeout_s:
                    continue
                raise ClientGone(f"nobody spoke for {self._idle_timeout_s:g} s") from error
            except OSError:
                return
            if not piece:
                return
            answer.output_bytes += len(piece)
            if wire.write(piece):
                try:
                    with self._idle_waits.one():
                        await wire.drain()
                except TimeoutError as error:
                    raise self._unread() from error

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
