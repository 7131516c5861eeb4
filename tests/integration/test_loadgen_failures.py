"""The load generator when servers misbehave: everything is recorded, nothing is raised."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from completion_server import (
    DEADLINE_S,
    HEAD,
    Server,
    chunk,
    make_rows,
    plain,
    run_one,
    serving,
    token,
    whole_stream,
)

from loadgen.client import Target, first_model
from loadgen.errors import EndpointError
from loadgen.replay import replay

pytestmark = pytest.mark.integration


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on a free port."""
    async with serving() as server:
        yield server


@pytest.mark.parametrize(
    ("answer", "error", "tokens_count"),
    [
        (
            plain(b"503 No", b'{"error":{"message":"no instance"}}'),
            "http 503: no instance",
            0,
        ),
        (plain(b"500 Oops", b"<xml>"), "http 500: <xml>", 0),
        (plain(b"502 Bad", b""), "http 502: (empty body)", 0),
        (HEAD + b"\r\n" + token(), "disconnected: ", 1),
        (b"", "disconnected: ", 0),
        (b"HTTP/1.1 200 OK\r\n", "disconnected: ", 0),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "bad answer: not an HTTP/1.1 answer", 0),
        (HEAD + b"\r\nzz\r\n", "bad answer: bad chunk size", 0),
        (HEAD + b"\r\n" + token() + b"0\r\n\r\n", "malformed: the stream ended without", 1),
        (HEAD + b"\r\n" + chunk(b"data: hello\n\n"), "malformed: event is not JSON", 0),
        (
            HEAD
            + b"\r\n"
            + token()
            + chunk(b'data: {"error":{"message":"died"}}\n\n')
            + b"0\r\n\r\n",
            "stream: died",
            1,
        ),
        (plain(b"200 OK", b"{}"), "malformed: the stream ended", 0),
    ],
)
async def test_what_goes_wrong_is_recorded(
    server: Server, answer: bytes, error: str, tokens_count: int
) -> None:
    """Every failure has its kind; the tokens that came before it are kept; nothing is raised."""

    async def send(_body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        raise ConnectionError

    server.answer = send
    record = await run_one(server)
    assert record.error is not None
    assert record.error.startswith(error)
    assert tokens_count == len(record.token_times_s)
    assert record.finished_s is not None


async def test_stream_that_stalls_meets_the_deadline(server: Server) -> None:
    """Tokens so far are kept and the connection is closed, which tells the engine to stop."""
    closed = asyncio.Event()

    async def stall(_body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\n" + token() + token())
        while True:  # comments, which keep the connection alive and are no tokens
            writer.write(chunk(b": ping\n\n"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async def notice(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        try:
            await stall(body, writer)
        finally:
            closed.set()

    server.answer = notice
    record = await run_one(server, request_timeout_s=0.3)
    assert record.error == "timeout: no end of the answer within 0.3 s"
    assert len(record.token_times_s) == 2
    async with asyncio.timeout(DEADLINE_S):
        await closed.wait()


async def test_refused_connection_is_recorded(server: Server) -> None:
    """Nobody listens there."""
    listener = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    record = await run_one(server, url=f"http://127.0.0.1:{port}")
    assert record.error is not None
    assert record.error.startswith("connect: ")
    assert (record.status, record.first_token_s) == (None, None)


async def test_failure_of_one_is_no_failure_of_others(server: Server) -> None:
    """A connection that breaks takes only its own request with it."""

    async def break_odd(body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) % 2:
            raise ConnectionError
        await whole_stream(body, writer)

    server.answer = break_odd
    target = Target(url=server.url, model="m")
    result = await replay(make_rows(6), (0.0,) * 6, target, in_flight_max=1)
    errors = [record.error is None for record in result.records]
    assert errors == [False, True] * 3


async def first_model_of(server: Server, answer: bytes) -> str:
    """What is made of this answer to `/v1/models`."""

    async def models(_body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    server.answer = models
    return await first_model(server.url)


async def test_first_model_is_asked_for(server: Server) -> None:
    """`/v1/models` names it."""
    body = b'{"data":[{"id":"qwen"},{"id":"other"}]}'
    assert await first_model_of(server, plain(b"200 OK", body)) == "qwen"
    assert server.heads[0].startswith("GET /v1/models HTTP/1.1\r\n")


@pytest.mark.parametrize("body", [b'{"data":[]}', b"<html>", b"[]", b'{"error":"key?"}'])
async def test_url_without_a_model_says_what_to_give(server: Server, body: bytes) -> None:
    """The answer is quoted and the option named."""
    with pytest.raises(EndpointError, match=r"names no model \(status 404.*--model"):
        await first_model_of(server, plain(b"404 Not Found", body))
