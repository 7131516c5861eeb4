"""A worker that costs nothing behind Dynamo's frontend, which does not speak HTTP to engines.

    .venv-peers/bin/python tests/benchmarks/proxy_dynamo.py PORT EVENT_PORT MODEL_FOLDER

It answers as proxy_backend.py does (so many tokens, the first at once, then one a tick) over
Dynamo's own request plane, and hands the KV events of the engine on EVENT_PORT to the frontends.
`POST /bench/tick` on PORT sets the tick; `GET /health` answers once the model is registered.
Runs in the environment of the peers.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from aiohttp import web
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    register_model,
)
from dynamo.runtime import DistributedRuntime

BLOCK_TOKENS = 16
KV_BLOCKS = 400_000
MODEL_LEN_TOKENS = 131_072
HELD_TOKENS = 100_000
"""Who asks for so many gets one and then nothing, until he leaves: as in proxy_backend.py."""

TOKEN = 300


class Worker:
    """Streams in step."""

    def __init__(self) -> None:
        self.tick_s = 0.02
        self._next = asyncio.Event()

    async def run(self) -> None:
        """Wake all streams each tick, until cancelled."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self.tick_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            woken, self._next = self._next, asyncio.Event()
            woken.set()

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[object]:
        """One token a tick."""
        count = request["stop_conditions"].get("max_tokens") or 1
        if count >= HELD_TOKENS:
            yield {"token_ids": [TOKEN]}
            await context.async_killed_or_stopped()
            return
        for _ in range(count - 1):
            yield {"token_ids": [TOKEN]}
            await self._next.wait()
            if context.is_stopped():
                return
        yield {"token_ids": [TOKEN], "finish_reason": "length"}

    async def told_tick(self, request: web.Request) -> web.Response:
        """What the benchmark says."""
        self.tick_s = float(await request.text())
        return web.Response()


async def healthy(_: web.Request) -> web.Response:
    """The model is registered."""
    return web.Response()


async def serve(port: int, event_port: int, folder: str) -> None:
    """Until killed."""
    worker = Worker()
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    config = ModelRuntimeConfig()
    config.total_kv_blocks = KV_BLOCKS
    config.context_length = MODEL_LEN_TOKENS
    served = endpoint.serve_endpoint(worker.generate)  # a future: it serves from here on
    publisher = KvEventPublisher(
        endpoint, kv_block_size=BLOCK_TOKENS, zmq_endpoint=f"tcp://127.0.0.1:{event_port}"
    )
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        folder,
        "sim",
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_TOKENS,
        runtime_config=config,
    )
    app = web.Application()
    app.add_routes([web.get("/health", healthy), web.post("/bench/tick", worker.told_tick)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await asyncio.gather(served, worker.run())
    finally:
        publisher.shutdown()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
