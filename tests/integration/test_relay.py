"""Streams that go from socket to socket: nobody is outrun, and no connection speaks out of turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from fleets import reserved
from prometheus_client import REGISTRY
from raw_engine import RawEngine, connection, exchange, post, read_message
from router_edge import edge
from waiting import until

pytestmark = pytest.mark.integration

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PAYLOAD = b"data: " + b"x" * 65_528 + b"\n\n"
PIECES = 512
DONE = b"data: [DONE]\n\n"
HELD_BYTES_MAX = 16 << 20
REQUEST = post("/v1/completions", b'{"model":"m","prompt":[1,2,3],"stream":true}')


def chunk(payload: bytes) -> bytes:
    """An HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(payload), payload)


@dataclass
class EagerEngine:
    """Writes a stream of 32 MiB as fast as it is taken.

    Attributes:
        name: its instance id.
        pieces_taken: pieces that have left it.
        behind: bytes after the end of each answer.
        connections: accepted so far.
    """

    name: str = "a"
    pieces: int = PIECES
    behind: bytes = b""
    pieces_taken: int = 0
    connections: int = 0
    url: str = ""
    ended: list[bool] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["EagerEngine"]:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await read_message(reader)
                writer.write(HEAD)
                for _ in range(self.pieces):
                    writer.write(chunk(PAYLOAD))
                    await writer.drain()
                    self.pieces_taken += 1
                writer.write(chunk(DONE) + b"0\r\n\r\n" + self.behind)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.append(True)
            writer.close()


async def test_a_client_that_does_not_read_stops_the_engine(redis_client, redis_socket) -> None:
    """What is held for it is bounded, not the length of the answer; later it gets every byte."""
    engine = EagerEngine()
    async with (
        edge(redis_client, redis_socket, engine) as one,
        connection(one.process.listeners.port) as (reader, writer),
    ):
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        seen = [-1]

        async def stands_still() -> bool:
            seen.append(engine.pieces_taken)
            await asyncio.sleep(0.2)
            return engine.pieces_taken == seen[-1] > 0

        await until(stands_still, "the engine waits for the client", 20)
        assert engine.pieces_taken * len(PAYLOAD) < HELD_BYTES_MAX
        async with asyncio.timeout(30):
            body = await read_chunks(reader)
        assert len(body) == PIECES * len(PAYLOAD) + len(DONE)
        assert body.count(PAYLOAD) == PIECES
        await one.settled()


async def test_a_client_that_never_reads_is_given_up(redis_client, redis_socket) -> None:
    """After the idle timeout, and the engine's connection is closed with it."""
    engine = EagerEngine()
    async with (
        edge(redis_client, redis_socket, engine, idle_timeout_s=0.5) as one,
        connection(one.process.listeners.port) as (_, writer),
    ):
        writer.write(REQUEST)
        await until(lambda: engine.pieces_taken, "the answer has begun")
        await until(lambda: engine.ended, "the engine is let go", 20)
        await one.settled()


async def test_the_end_of_an_answer_that_nobody_reads_is_given_up(
    redis_client, redis_socket
) -> None:
    """The engine is done, and still its reservation is not kept for a client that takes nothing."""
    engine = RawEngine("a", pieces=[HEAD, chunk(PAYLOAD) * 192, chunk(DONE) + b"0\r\n\r\n"])
    async with (
        edge(redis_client, redis_socket, engine, idle_timeout_s=1.0) as one,
        connection(one.process.listeners.port) as (_, writer),
    ):
        before = requests_told("client-gone")
        writer.write(REQUEST)
        await until(lambda: engine.requests, "the engine is asked")
        server = one.process.listeners._public.server
        assert server is not None
        [client] = [one.transport for one in server.connections]
        assert client is not None
        client.set_write_buffer_limits(high=1 << 30)  # so that all but the end gets into it
        engine.between.release()
        seen = [-1]

        async def stands_still() -> bool:
            seen.append(client.get_write_buffer_size())
            await asyncio.sleep(0.2)
            return client.get_write_buffer_size() == seen[-1] > 1 << 20

        await until(stands_still, "all but the end waits for the client", 20)
        client.set_write_buffer_limits()
        engine.between.release()
        await until(lambda: requests_told("client-gone") == before + 1, "it is given up", 5)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_the_error_at_the_end_of_a_stream_is_not_waited_for_either(
    redis_client, redis_socket
) -> None:
    """The total timeout ends a stream that nobody reads; its last event has a deadline, too."""
    engine = EagerEngine()
    bounds = {"idle_timeout_s": 1.5, "total_timeout_s": 0.5}
    async with (
        edge(redis_client, redis_socket, engine, **bounds) as one,
        connection(one.process.listeners.port) as (_, writer),
    ):
        before = requests_told("upstream-timeout")
        writer.write(REQUEST)
        await until(lambda: engine.pieces_taken, "the answer has begun")
        await until(lambda: engine.ended, "the engine is let go", 20)
        await one.settled()
        await until(
            lambda: requests_told("upstream-timeout") == before + 1, "the request has ended", 10
        )
        server = one.process.listeners._public.server
        assert server is not None
        await until(lambda: not server.connections, "the connection is closed")


async def test_a_slow_client_still_hears_why_its_stream_ends(redis_client, redis_socket) -> None:
    """It gets all that was sent, and the error behind it."""
    engine = EagerEngine()
    async with (
        edge(redis_client, redis_socket, engine, total_timeout_s=0.5) as one,
        connection(one.process.listeners.port) as (reader, writer),
    ):
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: engine.ended, "the engine is let go", 20)
        async with asyncio.timeout(10):
            body = await read_chunks(reader)
        assert body.startswith(PAYLOAD)
        assert b'"upstream-timeout"' in body[-1000:]
        await one.settled()


@pytest.mark.parametrize(("behind", "connections"), [(b"", 1), (b"HTTP/1.1 200 OK\r\n", 2)])
async def test_a_connection_with_more_than_its_answer_is_not_used_again(
    redis_client, redis_socket, behind: bytes, connections: int
) -> None:
    """The next client would get what was not meant for it."""
    engine = EagerEngine(pieces=0, behind=behind)
    async with edge(redis_client, redis_socket, engine) as one:
        for _ in range(2):
            _, body = await exchange(one.process.listeners.port, REQUEST)
            assert body == chunk(DONE) + b"0\r\n\r\n"
            await one.settled()
        assert engine.connections == connections


def requests_told(outcome: str) -> float:
    """Requests that have ended so."""
    found = REGISTRY.collect()
    samples = (one for metric in found for one in metric.samples)
    return sum(
        one.value
        for one in samples
        if one.name == "timestable_router_requests_total" and outcome in one.labels.values()
    )


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """The payload of a chunked body."""
    payload = []
    while size := int(await reader.readline(), 16):
        payload.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    return b"".join(payload)
