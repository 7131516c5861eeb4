"""A whole router in the test's event loop, and engines that do as they are told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio
from aiohttp import web
from builders import make_fleet_record, make_heartbeat, make_instance
from fleets import until
from listening import listening
from multidict import CIMultiDict

from indexer.contract import fleet_functions, functions, index_functions, keys
from indexer.contract.records import FleetRecord
from router.composition import Process, composed
from router.config import RouterConfig
from router.draining import drain

USAGE = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}
CHUNKS = [b'data: {"choices":[{"text":"one"}]}\n\n', b'data: {"choices":[{"text":"two"}]}\n\n']
LAST_CHUNKS = [f"data: {json.dumps({'usage': USAGE})}\n\n".encode(), b"data: [DONE]\n\n"]

PROMPT = list(range(64))
LEASE_S = 600.0
"""Nobody renews the engines' leases, and router processes may take a minute to start."""

Script = Callable[["FakeEngine", web.Request], Awaitable[web.StreamResponse]]


def completion(**changes: Any) -> dict[str, Any]:
    """A streamed completion of 64 token ids."""
    return {"model": "m", "prompt": PROMPT, "stream": True} | changes


def chat(text: str) -> dict[str, Any]:
    """A plain chat of one message."""
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


@dataclass
class FakeEngine:
    """A real HTTP server in place of vLLM; `script` says how it answers.

    Attributes:
        name: its instance id.
        script: answers one completion request.
        bodies: as received.
        headers: as received.
        let_go: scripts may wait for it.
        aborted: set when a request was cancelled by its client.
        connections: accepted so far.
        role: of its record.
    """

    name: str
    script: Script
    bodies: list[bytes] = field(default_factory=list)
    headers: list[CIMultiDict[str]] = field(default_factory=list)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    peers: set[Any] = field(default_factory=set)
    url: str = ""
    role: str = "both"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Note the request and follow the script."""
        self.bodies.append(await request.read())
        self.headers.append(request.headers.copy())
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        try:
            return await self.script(self, request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeEngine"]:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{tail:.*}", self.answer)
        async with listening(app, cancels=True) as self.url:
            yield self


async def stream_all(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A whole stream with usage."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in (*CHUNKS, *LAST_CHUNKS):
        await response.write(chunk)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def plain(_: FakeEngine, __: web.Request) -> web.StreamResponse:
    """A whole plain answer with usage."""
    return web.json_response({"choices": [{"text": "one two"}], "usage": USAGE})


async def silent(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Headers at once as vLLM sends them, and then prefill until let go."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    response._payload_writer.send_headers()  # type: ignore[union-attr]
    await engine.let_go.wait()
    await response.write(b"".join((*CHUNKS, *LAST_CHUNKS)))
    return response


async def one_chunk(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """One chunk, then nothing until let go."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(CHUNKS[0])
    await engine.let_go.wait()
    return response


async def broken_stream(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """One chunk, then the connection is gone."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(CHUNKS[0])
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang_up(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Read the request and close the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def failing(status: int) -> Script:
    """Always this status."""

    async def script(_: FakeEngine, __: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status)

    return script


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A running router and a client of it."""

    client: aiohttp.ClientSession
    process: Process
    fleet: FleetRecord

    async def settled(self) -> None:
        """Wait until nothing is in flight and Redis knows."""
        admission, ledger = self.process.admission, self.process.ledger
        await until(lambda: not admission.requests and ledger.settled(), "settled")

    async def drain(self, deadline_s: float, hurry: asyncio.Event | None = None) -> None:
        """As after a SIGTERM, with no notice; `hurry` is the second one."""
        process, hurry = self.process, hurry or asyncio.Event()
        await drain(
            process.admission, process.listeners, hurry, notice_s=0.0, deadline_s=deadline_s
        )


@asynccontextmanager
async def edge(
    redis_client: redis.asyncio.Redis,
    redis_socket: Path,
    *engines: Any,
    record: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Edge]:
    """A router in front of these engines, all of them members of one fleet of model `m`."""
    fleet = make_fleet_record()
    async with AsyncExitStack() as stack:
        await functions.run(redis_client, fleet_functions.create(fleet))
        for engine in engines:
            await stack.enter_async_context(engine.serving())
            own = {"url": engine.url, "model_root": "/nonexistent"}
            own["role"] = getattr(engine, "role", "both")
            one = make_instance(engine.name, **(own | (record or {})))
            join = fleet_functions.join(fleet.fleet_id, one.encode())
            slot, generation = await functions.run(redis_client, join)
            opened = index_functions.open_slot(fleet, slot, generation)
            await functions.run(redis_client, opened)
            beat = make_heartbeat(fleet, slot, generation, counters=None)
            held = replace(beat, args=(*beat.args[:3], LEASE_S, *beat.args[4:]))
            assert await functions.run(redis_client, held)
        await redis_client.sadd(keys.directory(), fleet.fleet_id)
        values = {
            "redis_url": f"unix://{redis_socket}",
            "port": 0,
            "index_deadline_s": 2.0,
        } | config
        process = await stack.enter_async_context(composed(RouterConfig(**values)))
        await process.index.refresh()
        client = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{process.listeners.port}")
        )
        yield Edge(client=client, process=process, fleet=fleet)


@asynccontextmanager
async def edge_without_redis(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A router whose Redis does not exist."""
    config = RouterConfig(redis_url=f"unix://{tmp_path}/none", port=0)
    async with (
        composed(config) as process,
        aiohttp.ClientSession(f"http://127.0.0.1:{process.listeners.port}") as client,
    ):
        yield client
