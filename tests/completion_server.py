"""A server that answers completion requests as a test tells it, byte by byte."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from loadgen.client import Target
from loadgen.records import RequestRecord
from loadgen.replay import replay
from loadgen.trace import TraceRow

DEADLINE_S = 20
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Timestable-Instance: engine-a\r\n"
DECISION = b'X-Timestable-Decision: {"policy":"lmetric","hit_tokens":16}\r\n'
DONE = b"data: [DONE]\n\n"

Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]


def chunk(payload: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def token(text: str = "x") -> bytes:
    """One token event as an HTTP chunk."""
    return chunk(b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n")


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> bytes:
    """The last event but one."""
    told = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n"


def plain(status: bytes, body: bytes) -> bytes:
    """A whole answer of a known length."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def whole_stream(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    """What an engine does: max_tokens tokens, usage, [DONE]."""
    prompt = body["prompt"]
    count = body["max_tokens"]
    assert isinstance(prompt, list)
    assert isinstance(count, int)
    writer.write(HEAD + DECISION + b"\r\n")
    for _ in range(count):
        writer.write(token())
        await writer.drain()
    writer.write(chunk(usage(len(prompt), count, 16) + DONE) + b"0\r\n\r\n")


class Server:
    """Answers every POST as told; keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = whole_stream
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.connections_count = 0
        self.arrived = asyncio.Condition()
        self.closing = asyncio.Event()
        self.url = ""

    async def wait_for_requests(self, count: int) -> None:
        """Until so many requests have arrived."""
        async with asyncio.timeout(DEADLINE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= count)

    async def silence(self, _body: dict[str, object], _writer: asyncio.StreamWriter) -> None:
        """The answer that never comes."""
        await self.closing.wait()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections_count += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length) or b"{}")
                async with self.arrived:
                    self.heads.append(head)
                    self.bodies.append(body)
                    self.arrived.notify_all()
                await self.answer(body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """A server on a free port."""
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.closing.set()
        listener.close()


def make_rows(count: int = 1, **changes: object) -> list[TraceRow]:
    """Rows of one block of 16 tokens with 3 tokens to answer."""
    values: dict[str, object] = {
        "arrival_s": 0.0,
        "prompt_tokens": 16,
        "output_tokens": 3,
        "block_size_tokens": 16,
    }
    return [TraceRow(**{**values, "block_ids": (index,), **changes}) for index in range(count)]


async def run_one(server: Server, **target: object) -> RequestRecord:
    """The record of a single request."""
    values: dict[str, object] = {"url": server.url, "model": "m", **target}
    async with asyncio.timeout(DEADLINE_S):
        result = await replay(make_rows(), (0.0,), Target(**values))
    return result.records[0]
