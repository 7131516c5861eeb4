"""Clients that leave, at any moment and in any way a socket allows; over real sockets."""

import asyncio
import json
import socket
import struct
from typing import Any, Final

import pytest
from fleets import reserved
from router_edge import (
    CHUNKS,
    Edge,
    FakeEngine,
    completion,
    edge,
    one_chunk,
    plain,
    silent,
    stream_all,
)
from waiting import until, until_equal

from router.tokens.tokenize import ModelTokenizers

pytestmark = pytest.mark.integration

LINGER_NOT: Final = struct.pack("ii", 1, 0)
SOON_S: Final = 2.0


def request(**changes: Any) -> bytes:
    """A completion as bytes."""
    body = json.dumps(completion(**changes)).encode()
    return b"\r\n".join(
        [
            b"POST /v1/completions HTTP/1.1",
            b"Host: router",
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            b"",
            body,
        ]
    )


async def connected(one: Edge) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the router."""
    return await asyncio.open_connection("127.0.0.1", one.process.listeners.port)


def close(writer: asyncio.StreamWriter) -> None:
    """As a client does that has gone."""
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """As a machine does whose client was killed."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    writer.transport.abort()


def half_close(writer: asyncio.StreamWriter) -> None:
    """No further request will come. Engines take that for a client that has gone, so does this."""
    writer.write_eof()


LEAVES = {"closes": close, "resets": reset, "half-closes": half_close}


@pytest.mark.parametrize("script", [silent, one_chunk], ids=["in prefill", "in mid-stream"])
@pytest.mark.parametrize("how", LEAVES)
async def test_the_engine_is_told_at_once(
    redis_client, redis_socket, how: str, script: Any
) -> None:
    """Before the first byte and after; the reservation ends and nobody is blamed."""
    engine = FakeEngine("a", script)
    async with edge(redis_client, redis_socket, engine, ejection_failures_min=1) as one:
        reader, writer = await connected(one)
        writer.write(request())
        await until(lambda: engine.bodies, "the engine has the request")
        if script is one_chunk:
            async with asyncio.timeout(SOON_S):
                await reader.readuntil(CHUNKS[0])
        LEAVES[how](writer)
        async with asyncio.timeout(SOON_S):
            await engine.aborted.wait()
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]
        async with one.client.get("/fleet") as answer:
            instances = (await answer.json())["fleets"][0]["instances"]
        assert instances[0]["failures_in_a_row"] == 0
        writer.close()


async def test_a_client_that_leaves_while_redis_hangs_asks_nobody(
    redis_client, redis_socket
) -> None:
    """Its place is free at once; when Redis is back, nothing is booked and no engine is asked."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine, index_deadline_s=30.0) as one:
        admission = one.process.admission
        reader, writer = await connected(one)
        writer.write(request())
        async with asyncio.timeout(5):  # once, so that what follows needs nothing new
            await reader.readuntil(b"[DONE]")
        await redis_client.execute_command("CLIENT", "PAUSE", "20000", "WRITE")
        try:
            writer.write(request())
            await until(lambda: admission.requests == 1, "the request waits")
            await asyncio.sleep(0.1)
            close(writer)
            await until(lambda: admission.requests == 0, "its place is free", SOON_S)
        finally:
            await redis_client.execute_command("CLIENT", "UNPAUSE")
        await one.settled()
        await until_equal([(0, 0)], lambda: reserved(redis_client, one.fleet))
        assert len(engine.bodies) == 1


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_asks_nobody(
    redis_client, redis_socket, monkeypatch
) -> None:
    """Its place is free before the tokenizer is done with it."""
    engine, tokenizing = FakeEngine("a", stream_all), asyncio.Event()

    async def slow(*_: object) -> None:
        tokenizing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ModelTokenizers, "encode", slow)
    async with edge(redis_client, redis_socket, engine) as one:
        _, writer = await connected(one)
        writer.write(request())
        async with asyncio.timeout(5):
            await tokenizing.wait()
        close(writer)
        await until(lambda: one.process.admission.requests == 0, "its place is free", SOON_S)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]
        assert engine.bodies == []


async def test_a_client_that_leaves_while_its_body_is_due_holds_nothing(
    redis_client, redis_socket
) -> None:
    """Neither a place nor bytes."""
    engine = FakeEngine("a", stream_all)
    async with edge(redis_client, redis_socket, engine) as one:
        admission = one.process.admission
        _, writer = await connected(one)
        writer.write(request()[:-10])
        await until(lambda: admission.requests == 1, "the request has begun")
        close(writer)
        await until(lambda: admission.requests == 0, "its place is free", SOON_S)
        assert engine.bodies == []


async def test_requests_on_one_connection_are_answered_in_order(redis_client, redis_socket) -> None:
    """Also where a client sends the second before the first is answered."""
    engine = FakeEngine("a", plain)
    async with edge(redis_client, redis_socket, engine) as one:
        reader, writer = await connected(one)
        writer.write(request(stream=False, user="1") + request(stream=False, user="2"))
        async with asyncio.timeout(5):
            for _ in range(2):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                assert b"one two" in await reader.readexactly(length)
        assert [json.loads(body)["user"] for body in engine.bodies] == ["1", "2"]
        close(writer)
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]


async def test_a_client_that_leaves_with_requests_in_line_is_gone_for_all(
    redis_client, redis_socket
) -> None:
    """The one under way is ended at its engine, those behind it never begin."""
    engine = FakeEngine("a", silent)
    async with edge(redis_client, redis_socket, engine) as one:
        _, writer = await connected(one)
        writer.write(request() * 3)
        await until(lambda: engine.bodies, "the engine has the first request")
        close(writer)
        async with asyncio.timeout(SOON_S):
            await engine.aborted.wait()
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)]
        assert len(engine.bodies) == 1


async def test_the_books_return_to_zero_after_a_storm_of_leavers(
    redis_client, redis_socket
) -> None:
    """Sixty clients on two engines leave at drawn moments in every way; nothing is left behind."""
    engines = FakeEngine("a", stream_all), FakeEngine("b", one_chunk)
    engines[1].let_go.set()
    async with edge(redis_client, redis_socket, *engines, ejection_failures_min=10**6) as one:

        async def visit(number: int) -> None:
            _, writer = await connected(one)
            writer.write(request())
            await asyncio.sleep((number * 7 % 60) / 1000)
            list(LEAVES.values())[number % 3](writer)
            await asyncio.sleep(0.05)
            writer.close()

        async with asyncio.timeout(20):
            await asyncio.gather(*(visit(number) for number in range(60)))
        await one.settled()
        await until_equal([(0, 0), (0, 0)], lambda: reserved(redis_client, one.fleet))
