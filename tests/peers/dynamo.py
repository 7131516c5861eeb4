"""Dynamo's mocker and frontend as processes, and what the mocker says of its blocks.

They run in an environment of their own; `make test-peers` builds it.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import zmq
import zmq.asyncio
from free_ports import consecutive_ports
from waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
TOKENIZER = ROOT / "workers" / "simulated" / "tokenizer"
BLOCK_TOKENS = 16
FIRST_TOKEN = 3  # behind the special ones
START_S = 60.0
STOP_S = 5.0

PLANES = ("--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq")
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


@asynccontextmanager
async def process(log: Path, *command: str, **environment: str) -> AsyncIterator[Process]:
    """A process that is gone at the end; its output goes to a file."""
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=os.environ | environment, stdout=out, stderr=out
        )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


@dataclass
class Resident:
    """Blocks of one rank by its own events: the reference, with plain sets of its own."""

    counts: dict[int, int] = field(default_factory=dict)
    children: dict[tuple[int | None, tuple[int, ...]], int] = field(default_factory=dict)
    removals_count: int = 0
    events_count: int = 0

    def apply(self, event: dict[str, Any]) -> None:
        """One event as it was on the wire."""
        self.events_count += 1
        if event["type"] == "BlockRemoved":
            self.removals_count += len(event["block_hashes"])
            for name in event["block_hashes"]:
                if name in self.counts:  # else it was stored before anybody listened
                    self.counts[name] -= 1
            return
        parent = event["parent_block_hash"]
        for i, name in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
            self.children[parent, tuple(tokens)] = name
            self.counts[name] = self.counts.get(name, 0) + 1
            parent = name

    def depth(self, prompt: Sequence[int]) -> int:
        """Leading blocks of a prompt that are there."""
        parent: int | None = None
        for depth in range(len(prompt) // BLOCK_TOKENS):
            tokens = tuple(prompt[depth * BLOCK_TOKENS : (depth + 1) * BLOCK_TOKENS])
            parent = self.children.get((parent, tokens))
            if parent is None or not self.counts[parent]:
                return depth
        return len(prompt) // BLOCK_TOKENS


@dataclass(kw_only=True)
class Dynamo:
    """A running mocker behind its frontend.

    Attributes:
        url: of the frontend.
        event_port: live events of rank 0; rank r adds r.
        replay_port: likewise.
        folder: of the model, with its tokenizer.
        resident: by rank.
    """

    url: str
    event_port: int
    replay_port: int
    folder: Path
    resident: list[Resident]
    http: aiohttp.ClientSession
    command: Sequence[str]
    log: Path
    environment: dict[str, str]

    @property
    def options(self) -> dict[str, str]:
        """Options of a sidecar that describe it."""
        return {
            "engine_url": self.url,
            "event_endpoint": f"tcp://127.0.0.1:{self.event_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
            "engine_block_size_tokens": str(BLOCK_TOKENS),
            "engine_ranks": str(len(self.resident)),
        }

    async def complete(self, prompt: Sequence[int] | str, path: str = "completions") -> int:
        """Send a prompt; its length in tokens."""
        body: dict[str, Any] = {"model": "m", "max_tokens": 1}
        if path == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        async with self.http.post(f"{self.url}/v1/{path}", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return int(answer["usage"]["prompt_tokens"])

    async def lists_model(self) -> bool:
        """Whether the frontend knows the mocker."""
        try:
            async with self.http.get(f"{self.url}/v1/models") as response:
                return "m" in [entry["id"] for entry in (await response.json())["data"]]
        except (aiohttp.ClientError, OSError):
            return False

    @asynccontextmanager
    async def mocking(self) -> AsyncIterator[Process]:
        """The mocker's process, known to the frontend and heard by the reference on every rank."""
        async with process(self.log, *self.command, **self.environment) as mocker:
            await until(self.lists_model, f"the mocker is up, see {self.log}", START_S)
            before = [resident.events_count for resident in self.resident]
            tokens = itertools.count(FIRST_TOKEN)

            async def is_heard() -> bool:
                # A subscription takes effect a little later and misses what was before.
                with contextlib.suppress(AssertionError):  # a former mocker is still listed
                    await self.complete([next(tokens)] * (BLOCK_TOKENS + 1))
                heard = [resident.events_count for resident in self.resident]
                return all(now > then for now, then in zip(heard, before, strict=True))

            await until(is_heard, "the reference hears every rank", START_S)
            yield mocker

    async def listen(self, rank: int) -> None:
        """Keep the reference up to date until cancelled."""
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(f"tcp://127.0.0.1:{self.event_port + rank}")
            while True:
                _, _, payload = await socket.recv_multipart()
                for event in msgpack.unpackb(payload)[1]:
                    self.resident[rank].apply(event)
        finally:
            context.destroy(linger=0)


@asynccontextmanager
async def dynamo(folder: Path, *, ranks: int, blocks: int) -> AsyncIterator[Dynamo]:
    """A frontend, and a mocker that is started by `Dynamo.mocking`, with so many blocks a rank."""
    model = folder / "model"
    shutil.copytree(TOKENIZER, model)
    (model / "config.json").write_text(json.dumps(MODEL))
    event_port, replay_port = consecutive_ports(ranks), consecutive_ports(ranks)
    http_port = consecutive_ports(1)
    environment = {
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    mocker = [str(PYTHON), "-m", "dynamo.mocker", *PLANES, f"--model-path={model}"]
    mocker += ["--model-name=m", f"--block-size={BLOCK_TOKENS}", "--speedup-ratio=0"]
    mocker += [f"--num-gpu-blocks-override={blocks}", f"--data-parallel-size={ranks}"]
    mocker += [f"--zmq-kv-events-ports={event_port}", f"--zmq-replay-ports={replay_port}"]
    frontend = [str(PYTHON), "-m", "dynamo.frontend", *PLANES]
    frontend += [f"--http-port={http_port}", "--http-host=127.0.0.1"]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(process(folder / "frontend.log", *frontend, **environment))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        peer = Dynamo(
            url=f"http://127.0.0.1:{http_port}",
            event_port=event_port,
            replay_port=replay_port,
            folder=model,
            resident=[Resident() for _ in range(ranks)],
            http=http,
            command=mocker,
            log=folder / "mocker.log",
            environment=environment,
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        listening = [tasks.create_task(peer.listen(rank)) for rank in range(ranks)]
        stack.callback(lambda: [task.cancel() for task in listening])
        yield peer
