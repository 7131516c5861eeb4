"""Two real vLLM processes, a sidecar beside each, two routers and an embedded Redis.

The engines differ where engines may: `a` tells its events straight to its sidecar, with integer
hashes and a ring that holds everything; `b` under a topic, with hashes as bytes and a ring of few
batches, through a forwarder that can lose messages; our plugin for vLLM tells `b`'s load after each
step. (Our eviction order is not in it: what these tests ask for once it rightly keeps least.)
"""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
from waiting import until

from deploy.local import embedded_redis
from deploy.local.part import Part
from deploy.local.ports import PortPicker
from tests.vllm.forwarder import Forwarder
from tests.vllm.parts import part, program, redis_part, router_part, session_without_pool
from tests.vllm.plugin_path import plugin_path
from tests.vllm.settings import (
    ADAPTERS,
    BLOCK,
    ENGINE_ENVIRONMENT,
    ENGINE_FLAGS,
    ENGINE_READY_S,
    HOST,
    MODEL,
    NAME,
    READY_S,
    RING_BATCHES,
    RUN_DIR,
    STOP_S,
    VLLM_PYTHON,
)


@dataclass(slots=True, kw_only=True)
class Worker:
    """One engine and its sidecar.

    Attributes:
        name: `a` or `b`.
        url: the engine's API.
        sidecar_url: the sidecar's /metrics.
        engine_command: how the engine is started, every time.
        environment: of the engine.
        sidecar_command: how the sidecar is started, without the journal's path.
        checkpoint_path: folder of the sidecar's checkpoints; None: it keeps none.
        forwarder: between the engine's events and the sidecar; None: there is nothing in between.
        engine: the running process.
        sidecar: the running process.
    """

    name: str
    url: str
    sidecar_url: str
    engine_command: Sequence[str]
    environment: Mapping[str, str]
    sidecar_command: Sequence[str]
    checkpoint_path: Path | None = None
    forwarder: Forwarder | None = None
    engine: Part | None = None
    sidecar: Part | None = None
    _starts: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def start_engine(self) -> None:
        """Start a new engine process; returns at once."""
        name = f"engine-{self.name}-{next(self._starts)}"
        self.engine = part(name, self.engine_command, self.environment)
        await self.engine.start()

    async def start_sidecar(self, *options: str) -> None:
        """Start a new sidecar process with a journal of its own; returns at once."""
        name = f"sidecar-{self.name}-{next(self._starts)}"
        journal = RUN_DIR / f"journal-{name}.jsonl"
        command = [*self.sidecar_command, f"--journal_path={journal}", *options]
        self.sidecar = part(name, command, {})
        await self.sidecar.start()

    def kill_engine(self) -> None:
        """SIGKILL for the engine and its children."""
        assert self.engine is not None
        self.engine.kill()

    def signal_sidecar(self, number: signal.Signals) -> None:
        """Send the sidecar a signal."""
        assert self.sidecar is not None
        if number == signal.SIGKILL:
            self.sidecar.kill()
        else:
            os.kill(self.sidecar.pid, number)


@dataclass(slots=True, kw_only=True)
class RealFleet:
    """The whole of it; see `running`."""

    session: aiohttp.ClientSession
    redis: Part
    workers: Mapping[str, Worker]
    routers: tuple[Part, ...]
    router_urls: tuple[str, ...]

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncIterator[Self]:
        """Start everything, hand it out when both instances are served, stop it at the end."""
        assert VLLM_PYTHON.exists(), f"no vLLM at {VLLM_PYTHON}: run `make test-vllm`"
        assert MODEL.exists(), f"no model at {MODEL}: run `make test-vllm`"
        RUN_DIR.mkdir(parents=True, exist_ok=True)
        for left in RUN_DIR.rglob("*"):
            if left.is_file():
                left.unlink()
        pick = PortPicker(host=HOST).pick
        redis_port = pick(21_000)
        redis_url = f"redis://{HOST}:{redis_port}"
        ports = [pick(21_010) for _ in range(2)]
        async with session_without_pool() as session:
            fleet = cls(
                session=session,
                redis=redis_part(redis_port),
                workers={name: _worker(name, redis_url, pick) for name in ("a", "b")},
                routers=tuple(
                    router_part(f"router-{number}", redis_url, port)
                    for number, port in enumerate(ports, start=1)
                ),
                router_urls=tuple(f"http://{HOST}:{port}" for port in ports),
            )
            try:
                await fleet._start(redis_url)
                yield fleet
            finally:
                await fleet._stop()

    async def _start(self, redis_url: str) -> None:
        await self.redis.start()
        async with asyncio.timeout(READY_S):
            await embedded_redis.wait_ready(redis_url)
        for worker in self.workers.values():
            await worker.start_engine()
            await worker.start_sidecar()  # it waits for its engine
        for router in self.routers:
            await router.start()
        for worker in self.workers.values():
            await self.wait_engine(worker)
        for url in self.router_urls:
            await until(lambda url=url: self.is_served(url, 2), f"{url} serves both", READY_S)

    async def wait_engine(self, worker: Worker) -> None:
        """Return when the engine answers its health check."""

        async def is_healthy() -> bool:
            assert worker.engine is not None
            assert worker.engine.exit_code is None, worker.engine.tail()
            return await self.status(f"{worker.url}/health") == 200

        await until(is_healthy, f"engine {worker.name} is healthy", ENGINE_READY_S)

    async def is_served(self, router_url: str, instances: int) -> bool:
        """Whether a router sees so many live instances and has the model's tokenizer."""
        if len(await self.live_instances(router_url)) != instances:
            return False
        loaded = f'timestable_router_tokenizer_loaded{{model="{NAME}"}} 1.0'
        return loaded in await self.text(f"{router_url}/metrics")

    async def _stop(self) -> None:
        workers = self.workers.values()
        sidecars = [worker.sidecar for worker in workers if worker.sidecar is not None]
        engines = [worker.engine for worker in workers if worker.engine is not None]
        for worker in workers:
            if worker.forwarder is not None:
                worker.forwarder.close()
        try:
            for parts in (self.routers, sidecars, engines, [self.redis]):
                await asyncio.gather(*(part.stop(STOP_S) for part in parts))
        finally:
            for part in (*self.routers, *sidecars, *engines, self.redis):
                part.kill()

    # -- what can be asked ------------------------------------------------------------------------

    async def status(self, url: str) -> int | None:
        """Status of a GET; None without an answer."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def text(self, url: str) -> str:
        """Body of a GET; empty without an answer."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def post(self, url: str) -> None:
        """POST without a body; it has to succeed."""
        async with self.session.post(url) as response:
            assert response.status == 200, await response.text()

    async def instances(self, router_url: str | None = None) -> list[dict[str, Any]]:
        """Instances of the fleet as a router shows them."""
        text = await self.text(f"{router_url or self.router_urls[0]}/fleet")
        fleets = json.loads(text)["fleets"] if text else []
        return [instance for fleet in fleets for instance in fleet["instances"]]

    async def live_instances(self, router_url: str | None = None) -> list[dict[str, Any]]:
        """Those that may be chosen: the lease is held and the engine is awake."""
        return [
            one
            for one in await self.instances(router_url)
            if one["lease_left_s"] > 0 and "SLEEPING" not in one["flags"]
        ]

    async def metric(self, worker: Worker, name: str, labels: str = "") -> float:
        """Sum of a metric of a worker's sidecar over the lines with these labels; 0 without."""
        lines = (await self.text(f"{worker.sidecar_url}/metrics")).splitlines()
        starts = (f"timestable_indexer_{name}{{", f"timestable_indexer_{name} ")
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(starts) and labels in line
        )

    def journals(self) -> list[str]:
        """What all sidecars have published so far."""
        paths = sorted(RUN_DIR.glob("journal-*.jsonl"))
        return [
            line for path in paths for line in path.read_text().splitlines() if line.endswith("}")
        ]


def _worker(name: str, redis_url: str, pick: Callable[[int], int]) -> Worker:
    port, events, replay, metrics = pick(21_100), pick(21_110), pick(21_120), pick(21_130)
    url = f"http://{HOST}:{port}"
    engine: dict[str, object] = {
        "model": MODEL,
        "served_model_name": NAME,
        "port": port,
        "event_endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    sidecar: dict[str, object] = {
        "engine_url": url,
        "redis_url": redis_url,
        "block_size_tokens": BLOCK,
        "instances_expected": 2,
        "metrics_host": HOST,
        "metrics_port": metrics,
    }
    environment = dict(ENGINE_ENVIRONMENT)
    forwarder, checkpoint_path = None, None
    if name == "b":
        engine |= {"event_topic": "kv@b", "replay_batches_max": RING_BATCHES}
        steps = pick(21_150)
        environment |= {
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
            "PYTHONPATH": plugin_path(RUN_DIR / "plugins"),
            "TIMESTABLE_VLLM_STEPS": f"tcp://{HOST}:{steps}",
        }
        checkpoint_path = sidecar["checkpoint_path"] = RUN_DIR / "checkpoints"
        checkpoint_path.mkdir(exist_ok=True)
        forwarded = pick(21_140)
        forwarder = Forwarder(f"tcp://{HOST}:{events}", f"tcp://{HOST}:{forwarded}")
        sidecar |= {
            "event_endpoint": f"tcp://{HOST}:{forwarded}",
            "replay_endpoint": f"tcp://{HOST}:{replay}",
            "step_endpoint": f"tcp://*:{steps}",
        }
    lora = [
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
        *(f"{adapter}={MODEL / adapter}" for adapter in ADAPTERS),
    ]
    command = [str(VLLM_PYTHON), "-m", "workers", "vllm"]
    command += [f"--{key}={value}" for key, value in engine.items()]
    return Worker(
        name=name,
        url=url,
        sidecar_url=f"http://{HOST}:{metrics}",
        engine_command=[*command, "--", *ENGINE_FLAGS, *lora],
        environment=environment,
        sidecar_command=program("indexer", **sidecar),
        checkpoint_path=checkpoint_path,
        forwarder=forwarder,
    )
