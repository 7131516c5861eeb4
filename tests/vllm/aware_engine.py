"""A real engine of its own that evicts by category, behind a sidecar and a router."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
from waiting import until

from deploy.local import embedded_redis
from deploy.local.part import Part
from deploy.local.ports import PortPicker
from tests.vllm.parts import part, program, redis_part, router_part, session_without_pool
from tests.vllm.settings import (
    BLOCK,
    ENGINE_ENVIRONMENT,
    ENGINE_FLAGS,
    ENGINE_READY_S,
    HOST,
    MODEL,
    NAME,
    READY_S,
    STOP_S,
    VLLM_PYTHON,
)

CAPACITY_BLOCKS = 48


@dataclass(slots=True, kw_only=True)
class AwareEngine:
    """One engine with the plugin on, its sidecar, a router that tells categories, and Redis."""

    session: aiohttp.ClientSession
    redis: Part
    engine: Part
    sidecar: Part
    router: Part
    router_url: str

    @classmethod
    @asynccontextmanager
    async def starting(cls, folder: Path, python_path: str) -> AsyncIterator[Self]:
        """Start everything and hand it out at once: `wait_ready` returns when it serves.

        Args:
            folder: of logs.
            python_path: where the engine finds the plugin.
        """
        pick = PortPicker(host=HOST).pick
        redis_port, router_port, port = pick(21_200), pick(21_201), pick(21_202)
        redis_url, engine_url = f"redis://{HOST}:{redis_port}", f"http://{HOST}:{port}"

        engine = [
            *(str(VLLM_PYTHON), "-m", "workers", "vllm", f"--model={MODEL}", f"--port={port}"),
            *(f"--served_model_name={NAME}", f"--event_endpoint=tcp://*:{pick(21_203)}"),
            *(f"--replay_endpoint=tcp://*:{pick(21_204)}", "--", *ENGINE_FLAGS),
            *("--num-gpu-blocks-override", str(CAPACITY_BLOCKS)),  # the last one counts
        ]
        environment = {
            **ENGINE_ENVIRONMENT,
            "PYTHONPATH": python_path,
            "TIMESTABLE_VLLM_EVICTION": "workload_aware",
        }
        sidecar = program(
            "indexer",
            engine_url=engine_url,
            redis_url=redis_url,
            block_size_tokens=BLOCK,
            instances_expected=1,
            metrics_port=0,
        )
        async with session_without_pool() as session:
            started = cls(
                session=session,
                redis=redis_part(redis_port, folder=folder),
                engine=part("engine", engine, environment, folder=folder),
                sidecar=part("sidecar", sidecar, folder=folder),
                router=router_part("router", redis_url, router_port, folder=folder),
                router_url=f"http://{HOST}:{router_port}",
            )
            parts = (started.router, started.sidecar, started.engine, started.redis)
            try:
                await started.redis.start()
                async with asyncio.timeout(READY_S):
                    await embedded_redis.wait_ready(redis_url)
                for one in reversed(parts[:-1]):
                    await one.start()
                yield started
            finally:
                try:
                    await asyncio.gather(*(one.stop(STOP_S) for one in parts))
                finally:
                    for one in parts:
                        one.kill()

    async def wait_ready(self) -> None:
        """Return when the router serves the engine's model."""

        async def is_served() -> bool:
            assert self.engine.exit_code is None, self.engine.tail()
            try:
                async with self.session.get(f"{self.router_url}/v1/models") as response:
                    return f'"{NAME}"' in await response.text()
            except aiohttp.ClientError:
                return False

        await until(is_served, "the router serves the engine", ENGINE_READY_S)

    def categories(self) -> list[str]:
        """Those that the plugin has told to be new, in order."""
        return re.findall(r"category '([^']*)' is new", self.engine.log_path.read_text())
