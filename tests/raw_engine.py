"""An engine and a client that see the bytes on the wire, as no HTTP library shows them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

DEADLINE_S = 20.0


@dataclass
class RawEngine:
    """Notes every request as bytes and answers with given pieces, each in a packet of its own.

    Attributes:
        name: its instance id.
        pieces: head and body of every answer, as they go over the wire.
        requests: head and body of what came.
        arrived: requests so far.
        let_go: answers wait for it.
        between: is waited for between two pieces.
    """

    name: str
    pieces: Sequence[bytes] = (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",)
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    between: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    url: str = ""

    def __post_init__(self) -> None:
        self.let_go.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["RawEngine"]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.requests.append(await read_message(reader))
                await self.let_go.wait()
                for index, piece in enumerate(self.pieces):
                    if index > 0:
                        await self.between.acquire()
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of a message; of a chunked body what was sent, frames included."""
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            return head, await reader.readuntil(b"0\r\n\r\n")
        _, told, rest = lowered.partition(b"content-length:")
        length = int(rest.split(b"\r\n", 1)[0]) if told else 0
        return head, await reader.readexactly(length)


def headers_of(head: bytes) -> list[tuple[str, str]]:
    """Names and values in order, as they were written."""
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]


@asynccontextmanager
async def connection(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection, closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def exchange(port: int, *sent: bytes) -> tuple[bytes, bytes]:
    """Send a request in these pieces, and read one answer."""
    async with connection(port) as (reader, writer):
        for piece in sent:
            writer.write(piece)
            await writer.drain()
        return await read_message(reader)


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A POST request."""
    head = [f"POST {path} HTTP/1.1", "Host: router", *lines, f"Content-Length: {len(body)}"]
    return "\r\n".join((*head, "", "")).encode("latin-1") + body
