"""What `make chaos` works with: proxies that misbehave when told, a clock that moves."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from listening import listening
from waiting import until, until_equal

from deploy.chaos.clock import MovableClock, unavailable_reason
from deploy.chaos.delay_proxy import DelayProxy
from deploy.chaos.http_proxy import EngineProxy, Fault
from deploy.local import embedded_redis
from deploy.local.part import Part
from deploy.local.ports import PortPicker

CHUNKS = [b"data: %d\n\n" % n for n in range(6)]
PATH = "/v1/completions"


class Engine:
    """Streams a few events, one each 10 ms, and knows whether its client stayed."""

    def __init__(self) -> None:
        self.begun = 0
        self.aborted = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer as an engine does."""
        self.begun += 1
        await request.read()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            for chunk in CHUNKS:
                await answer.write(chunk)
                await asyncio.sleep(0.01)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        return answer


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Engine, EngineProxy, aiohttp.ClientSession]]:
    """An engine, a proxy before it, a client."""
    engine = Engine()
    app = web.Application()
    app.router.add_post(PATH, engine.complete)

    async def health(_: web.Request) -> web.Response:
        return web.Response(text="well")

    app.router.add_get("/health", health)
    async with (
        listening(app, cancels=True) as url,
        EngineProxy(url) as proxy,
        aiohttp.ClientSession() as client,
    ):
        yield engine, proxy, client


async def test_a_proxy_without_a_fault_passes_everything() -> None:
    """Status, headers and bytes arrive; a client that leaves is seen by the engine."""
    async with proxied() as (engine, proxy, client):
        async with client.post(proxy.url + PATH, json={}) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.read() == b"".join(CHUNKS)
        async with client.post(proxy.url + PATH, json={}) as answer:
            await answer.content.readany()
        await until(lambda: engine.aborted == 1, "the engine to see it")


@pytest.mark.parametrize("fault", [f for f in Fault if f.status is not None])
async def test_a_proxy_answers_in_the_engines_place(fault: Fault) -> None:
    """Completions get the status, and their ids are noted; health checks pass."""
    async with proxied() as (engine, proxy, client):
        await proxy.set_fault(fault)
        headers = {"x-request-id": "r-1"}
        async with client.post(proxy.url + PATH, json={}, headers=headers) as answer:
            assert answer.status == fault.status
        async with client.get(proxy.url + "/health") as answer:
            assert await answer.text() == "well"
        assert (proxy.hits[fault], proxy.hit_ids, engine.begun) == (1, {"r-1"}, 0)


async def test_a_proxy_resets_connections() -> None:
    """Before the first byte nothing was answered; in mid-stream the end is missing."""
    async with proxied() as (_, proxy, client):
        await proxy.set_fault(Fault.RESET_BEFORE_FIRST_BYTE)
        with pytest.raises(aiohttp.ClientOSError):
            await client.post(proxy.url + PATH, json={})
        await proxy.set_fault(Fault.RESET_MID_STREAM)
        async with client.post(proxy.url + PATH, json={}) as answer:
            first = await answer.content.readany()
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
                await answer.read()
        assert first.startswith(CHUNKS[0])


async def test_a_proxy_refuses_and_listens_again_on_its_port() -> None:
    """While it refuses nobody listens, kept connections included; then all is as before."""
    async with proxied() as (_, proxy, client):
        url = proxy.url
        async with client.get(url + "/health") as answer:
            assert answer.status == 200
        await proxy.set_fault(Fault.REFUSE)
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.post(url + PATH, json={})
        await proxy.set_fault(None)
        async with client.post(url + PATH, json={}) as answer:
            assert await answer.read() == b"".join(CHUNKS)


async def test_a_proxy_that_begins_to_refuse_knows_whom_it_cut_off() -> None:
    """A stream under way then breaks, and is no fault of a router."""
    async with proxied() as (_, proxy, client):
        async with client.post(
            proxy.url + PATH, json={}, headers={"x-request-id": "done"}
        ) as answer:
            await answer.read()
        async with client.post(
            proxy.url + PATH, json={}, headers={"x-request-id": "r-1"}
        ) as answer:
            await answer.content.readany()
            await proxy.set_fault(Fault.REFUSE)
            with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
                await answer.read()
        assert proxy.hit_ids == {"r-1"}


async def test_a_proxy_that_hangs_goes_on_when_told() -> None:
    """The request is answered as ever once the fault is lifted."""
    async with proxied() as (engine, proxy, client):
        await proxy.set_fault(Fault.HANG)

        async def ask() -> bytes:
            async with client.post(proxy.url + PATH, json={}) as answer:
                return await answer.read()

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(ask())
            await until(lambda: proxy.hits[Fault.HANG] == 1, "the request to hang")
            assert engine.begun == 0
            await proxy.set_fault(None)
        assert waiting.result() == b"".join(CHUNKS)


async def test_answers_are_late_and_in_order() -> None:
    """Every answer waits for the delay, none overtakes, and none is lost when it ends."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, DelayProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        proxy.delay_s = 0.2
        started_s = time.monotonic()
        writer.write(b"1\n")
        assert await reader.readline() == b"1\n"
        assert time.monotonic() - started_s >= 0.19
        writer.write(b"2\n")
        await asyncio.sleep(0.05)
        proxy.delay_s = 0.0
        writer.write(b"3\n")
        assert [await reader.readline() for _ in range(2)] == [b"2\n", b"3\n"]
        writer.close()


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
async def test_the_clock_of_redis_moves_both_ways(tmp_path: Path) -> None:
    """TIME and expiries follow; the server goes on."""
    clock = MovableClock(tmp_path / "clock")
    port = PortPicker(host="127.0.0.1").pick(21_500)
    part = Part(
        name="redis",
        command=embedded_redis.command(host="127.0.0.1", port=port, directory=tmp_path),
        log_path=tmp_path / "log",
        environment=clock.environment,
    )
    await part.start()
    client = embedded_redis.client(f"redis://127.0.0.1:{port}")
    try:
        async with asyncio.timeout(20):
            await embedded_redis.wait_ready(f"redis://127.0.0.1:{port}")

        async def rounded() -> int:
            """How far its clock is ahead, to ten seconds."""
            seconds, _ = await client.time()
            return round((seconds - time.time()) / 10) * 10

        assert await rounded() == 0
        await client.set("short", 1, ex=60)
        clock.set_offset_s(3600)
        await until_equal(3600, rounded)
        assert await client.get("short") is None
        clock.set_offset_s(-3600)
        await until_equal(-3600, rounded)
        assert await client.ping()
    finally:
        await client.aclose()
        await part.stop(5.0)
