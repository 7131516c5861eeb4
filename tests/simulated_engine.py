"""A simulated engine in this process, and an HTTP client for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from workers.config import SimulateConfig
from workers.simulated.engine import Engine
from workers.simulated.run import build
from workers.simulated.runtime import EngineRuntime
from workers.simulated.server import make_runner

DEADLINE_S = 20.0
MESSAGES = [{"role": "user", "content": "Tell me about blocks, tails and trees. " * 10}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running instance and a client for it."""

    engine: Engine
    http: aiohttp.ClientSession
    runtime: EngineRuntime
    runner: web.AppRunner

    @property
    def url(self) -> str:
        """Where it answers."""
        return str(self.http._base_url).rstrip("/")

    async def kill(self) -> None:
        """As SIGKILL does: the port refuses, and every connection is reset."""
        for site in list(self.runner.sites):
            await site.stop()
        assert self.runner.server is not None
        for _ in range(10):  # one that was just accepted is known an iteration later
            for connection in self.runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0)

    async def post(self, path: str, **fields: object) -> dict[str, Any]:
        """A request that must succeed."""
        async with self.http.post(path, json=fields) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    async def events(self, path: str, **fields: object) -> list[str]:
        """The data of all server-sent events of a streamed request."""
        async with self.http.post(path, json={**fields, "stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = await response.text()
        assert text.endswith("\n\n")
        return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


@asynccontextmanager
async def running(*, deadline_s: float = DEADLINE_S, **options: Any) -> AsyncIterator[Live]:
    """An instance in this process for at most so long; 50 virtual seconds pass in a real one."""
    defaults: dict[str, Any] = {
        "port": 0,
        "speedup": 50.0,
        "capacity_blocks": 2000,
        "event_endpoint": "tcp://127.0.0.1:*",
        "replay_endpoint": "tcp://127.0.0.1:*",
    }
    parts = build(SimulateConfig(**{**defaults, **options}))
    runner = make_runner(parts.server, shutdown_timeout_s=DEADLINE_S)
    await runner.setup()
    async with AsyncExitStack() as stack:
        stack.callback(parts.publisher.close if parts.publisher else lambda: None)
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tasks = [asyncio.ensure_future(parts.runtime.run())]
        if parts.publisher:
            tasks.append(asyncio.ensure_future(parts.publisher.serve_replays()))
        for task in tasks:
            stack.callback(task.cancel)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        async with asyncio.timeout(deadline_s):
            yield Live(engine=parts.runtime.engine, http=http, runtime=parts.runtime, runner=runner)
