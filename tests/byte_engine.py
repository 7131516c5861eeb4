"""An engine of bytes: a TCP server that fails as no HTTP library would let one fail."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

HEADERS_END = b"\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass
class Connection:
    """One accepted connection, after a whole request has been read."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """These bytes, in a piece of their own as far as TCP allows."""
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0.02)

    def reset(self) -> None:
        """Close so that the other end sees a reset."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Return when the other end has closed."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Answer = Callable[[Connection], Awaitable[None]]


@dataclass
class ByteEngine:
    """Reads a request and does with its connection what `answer` says; then closes it.

    Attributes:
        name: its instance id.
        answer: what to do once a request has been read.
        bodies: of the requests, as received.
        left: how many clients closed their connections first.
    """

    name: str
    answer: Answer
    bodies: list[bytes] = field(default_factory=list)
    left: int = 0
    url: str = ""

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator["ByteEngine"]:
        """Listen, on a free port unless told another."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(HEADERS_END)
            fields = dict(
                line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line
            )
            self.bodies.append(await reader.readexactly(int(fields.get(b"content-length", b"0"))))
            await self.answer(Connection(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left += 1
        finally:
            writer.close()


def chunk(data: bytes) -> bytes:
    """As chunked encoding sends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def saying(*pieces: bytes, reset: bool = False) -> Answer:
    """Send these, one after the other, and close."""

    async def answer(connection: Connection) -> None:
        for piece in pieces:
            await connection.send(piece)
        if reset:
            connection.reset()

    return answer


def plain(status: bytes, body: bytes, *headers: bytes) -> bytes:
    """A whole answer with a length."""
    lines = [b"HTTP/1.1 " + status, b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])
