"""Engines that prefill and engines that decode, behind one router."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from aiohttp import web
from fleets import reserved
from prometheus_client import REGISTRY
from router_edge import (
    CHUNKS,
    LAST_CHUNKS,
    Edge,
    FakeEngine,
    Script,
    completion,
    edge,
    one_chunk,
    stream_all,
)

from indexer.contract import fleet_functions, functions
from indexer.contract.identifiers import SlotIndex
from indexer.contract.records import FleetRecord, IndexCounters, SlotFlag

PREFILLED = "x-timestable-prefill-instance"
STREAM = b"".join((*CHUNKS, *LAST_CHUNKS))
HELD = '{"do_remote_prefill": true, "remote_block_ids": [1,  2], "lease": 1e2, "remote_host": "%s"}'
"""With spaces and a number that no parser writes again as it was."""


async def hands_over(engine: FakeEngine, _: web.Request) -> web.StreamResponse:
    """A whole prefill leg."""
    usage = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 0}}
    fields = f'{{"choices": [], "usage": {json.dumps(usage)}, "kv_transfer_params": '
    text = fields + HELD % engine.name + "}"
    return web.Response(text=text, content_type="application/json")


async def hands_over_or_streams(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """A prefill leg, or a whole request."""
    is_leg = b"kv_transfer_params" in engine.bodies[-1]
    return await (hands_over if is_leg else stream_all)(engine, request)


async def prefills_for_ever(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """No answer until let go."""
    await engine.let_go.wait()
    return await hands_over(engine, request)


async def error_event(_: FakeEngine, request: web.Request) -> web.StreamResponse:
    """As vLLM says in a stream that a transfer has failed: its status has been sent before."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
    await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    await response.write(LAST_CHUNKS[-1])
    return response


async def one_chunk_when_let_go(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    """Nothing at first."""
    await engine.let_go.wait()
    return await one_chunk(engine, request)


def first_then(first: Script, then: Script) -> Script:
    """Another script from the second request on."""

    async def script(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        chosen = first if len(engine.bodies) == 1 else then
        return await chosen(engine, request)

    return script


def prefiller(name: str, script: Script = hands_over) -> FakeEngine:
    """An instance of the prefill pool."""
    return FakeEngine(name, script, role="prefill")


def decoder(name: str, script: Script = stream_all) -> FakeEngine:
    """An instance of the decode pool."""
    return FakeEngine(name, script, role="decode")


@asynccontextmanager
async def fleet(
    redis_client: Any, redis_socket: Any, *engines: FakeEngine, **config: Any
) -> AsyncIterator[Edge]:
    """A router in front of them, whose counters are all zero at the end."""
    async with edge(redis_client, redis_socket, *engines, **config) as one:
        yield one
        await one.settled()
        assert await reserved(redis_client, one.fleet) == [(0, 0)] * len(engines)


async def drain(client: redis.asyncio.Redis, of: FleetRecord, slot: SlotIndex) -> None:
    """The instance's sidecar says that it drains."""
    beat = fleet_functions.heartbeat(
        of,
        slot,
        1,
        state=SlotFlag.DRAINING,
        index=IndexCounters(blocks=0, completeness_ratio=0.0),
        counters=None,
    )
    assert await functions.run(client, beat)


async def ask(one: Edge, **changes: Any) -> tuple[int, bytes, Any]:
    """Status, body and headers of a completion."""
    async with one.client.post("/v1/completions", json=completion(**changes)) as answer:
        return answer.status, await answer.read(), answer.headers


def legs(leg: str, result: str) -> float:
    """How many there were, of all tests."""
    labels = {"leg": leg, "result": result}
    return REGISTRY.get_sample_value("timestable_router_legs_total", labels) or 0.0
