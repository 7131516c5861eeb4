"""KV events of Dynamo's mocker, ingested by a sidecar that knows of Dynamo only by options."""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import redis.asyncio
from peers.dynamo import PYTHON, TOKENIZER, Dynamo, dynamo, process
from sidecar_run import Probe
from transformers import AutoTokenizer
from waiting import until, until_equal

from router.composition import composed
from router.config import RouterConfig

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not PYTHON.exists(), reason="peer not installed: make test-peers builds it"),
]

TEXT = "Tell me about blocks, tails and trees, and what of them is left after a night. " * 6


@pytest.fixture
def probe(redis_client: redis.asyncio.Redis) -> Probe:
    """The embedded server, empty."""
    return Probe(redis_client)


@asynccontextmanager
async def sidecar(peer: Dynamo, redis_socket: Path, folder: Path) -> AsyncIterator[None]:
    """`python -m indexer` beside the mocker."""
    options = peer.options | {"redis_url": f"unix://{redis_socket}", "metrics_port": "0"}
    args = [f"--{key}={value}" for key, value in options.items()]
    async with process(folder / "sidecar.log", sys.executable, "-m", "indexer", *args):
        yield


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 4 to 12 blocks and some tokens more; each continues an earlier one's beginning."""
    rng = np.random.default_rng(seed)
    made: list[list[int]] = []
    for n in range(count):
        head = made[int(rng.integers(n))] if n else []
        kept = int(rng.integers(len(head) // 16 + 1)) * 16
        length = int(rng.integers(4, 13)) * 16 + 4
        own = rng.integers(3, 4096, max(length - kept, 20)).tolist()
        made.append([*head[:kept], *own])
        made[-1] = made[-1][: len(made[-1]) // 16 * 16 + 4]
    return made


async def test_prompts_are_indexed_at_their_depth(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """On every rank the index holds what the mocker's events say, also what came before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    early, late = prompts(12, seed=1), prompts(12, seed=2)
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT}], add_generation_prompt=True, return_dict=False
    )
    async with dynamo(tmp_path, ranks=2, blocks=2000) as peer, peer.mocking():
        for prompt in early:
            assert await peer.complete(prompt) == len(prompt)
        async with sidecar(peer, redis_socket, tmp_path):
            assert await peer.complete(TEXT) == len(text)
            assert await peer.complete(TEXT, "chat/completions") == len(chat)
            for prompt in late:
                await peer.complete(prompt)
            sent = [*early, text, chat, *late]
            for prompt in sent:
                await until(lambda p=prompt: whole(peer, p), "the mocker tells of the prompt")
            for prompt in sent:
                expected = [resident.depth(prompt) for resident in peer.resident]
                await until_equal(expected, lambda p=prompt: probe.depths(p))
            assert all(resident.counts for resident in peer.resident)


def whole(peer: Dynamo, prompt: Sequence[int]) -> bool:
    """Whether a rank has announced all full blocks of a prompt."""
    return max(resident.depth(prompt) for resident in peer.resident) == len(prompt) // 16


async def test_predictions_are_what_the_mocker_reports(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """Behind a router every predicted hit is the mocker's cached tokens, over evictions too."""
    config = RouterConfig(
        redis_url=f"unix://{redis_socket}",
        port=0,
        index_deadline_s=10.0,
        tokenizers={"m": str(TOKENIZER)},
    )
    pairs: list[tuple[int, int]] = []
    async with (
        dynamo(tmp_path, ranks=1, blocks=60) as peer,
        peer.mocking(),
        sidecar(peer, redis_socket, tmp_path),
        composed(config) as router,
        aiohttp.ClientSession(f"http://127.0.0.1:{router.listeners.port}") as client,
    ):
        await until(probe.slots, "the sidecar has joined")
        await router.index.refresh()
        sent = prompts(60, seed=3)
        for n, prompt in enumerate(sent):
            pairs.append(await ask(client, prompt))
            (resident,) = peer.resident
            await until(lambda p=prompt: whole(peer, p), "the mocker tells of the prompt")
            for one in sent[: n + 1]:
                await until_equal([resident.depth(one)], lambda p=one: probe.depths(p))
        assert resident.removals_count > 100
    assert sum(actual for _, actual in pairs) > 1000
    assert [actual for _, actual in pairs] == [predicted for predicted, _ in pairs]


async def ask(client: aiohttp.ClientSession, prompt: Sequence[int]) -> tuple[int, int]:
    """Predicted and reported hit tokens of a prompt."""
    async with client.post(
        "/v1/completions",
        json={"model": "m", "prompt": prompt, "max_tokens": 1},
        headers={"x-timestable-explain": "1"},
    ) as response:
        answer = await response.json()
        assert response.status == 200, answer
        decision = json.loads(response.headers["x-timestable-decision"])
    assert not decision["degraded"], decision
    return decision["hit_tokens"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_restarted_mocker_is_another_instance(
    redis_socket: Path, probe: Probe, tmp_path: Path
) -> None:
    """Nothing of a former process is credited to the one that took its ports."""
    former, latter = prompts(2, seed=4)
    async with dynamo(tmp_path, ranks=1, blocks=200) as peer, sidecar(peer, redis_socket, tmp_path):
        async with peer.mocking() as mocker:
            await peer.complete(former)
            await until_equal([len(former) // 16], lambda: probe.depths(former))
            (before,) = await probe.instances()
            mocker.kill()
            await mocker.wait()
        async with peer.mocking():
            await until(lambda: answers(peer, latter), "the frontend has found the new mocker", 30)
            await until(lambda: probe.holds(latter, len(latter) // 16), "its blocks", 30)
            (after,) = await probe.instances()
            assert before.instance_id != after.instance_id
            shared = common_blocks(former, latter)
            assert not await probe.holds(former, shared + 1)


async def answers(peer: Dynamo, prompt: Sequence[int]) -> bool:
    """Whether a prompt is served."""
    try:
        return await peer.complete(prompt) == len(prompt)
    except AssertionError:
        return False


def common_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading blocks that two prompts share."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0) // 16
