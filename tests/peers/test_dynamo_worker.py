"""The worker behind Dynamo's frontend in `make bench-proxy` is what its figures need."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from benchmarks.proxy_targets import Stage, Target
from peers.dynamo import PYTHON, TOKENIZER
from transformers import AutoTokenizer
from waiting import until

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not PYTHON.exists(), reason="peer not installed: make test-peers builds it"),
]

SENTENCE = "Tell me about blocks, tails and trees. "
TOKENS = 7
HEARD_S = 30.0


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Engines and Dynamo's workers beside them, on any one core."""
    core = min(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        stage = Stage(stack=stack, folder=tmp_path, proxy_core=core, other_core=core, session=http)
        await stage.engines()
        await stage.dynamo_workers(PYTHON)
        yield stage


def chat(name: str) -> list[dict[str, str]]:
    """A prompt of many blocks that shares none with another."""
    return [{"role": "user", "content": f"{name} {SENTENCE * 60}"}]


async def asked(stage: Stage, target: Target, name: str, **fields: object) -> str:
    """An answer as it comes."""
    body = {"model": "sim", "messages": chat(name), **fields}
    async with stage.session.post(f"{target.url}/v1/chat/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    return text


async def test_an_answer_has_as_many_events_as_tokens_are_asked_for(stage: Stage) -> None:
    """One event a token, and the end."""
    target = await stage.dynamo(PYTHON, "round-robin")
    text = await asked(stage, target, "a", stream=True, max_tokens=TOKENS)
    lines = text.split("\n\n")
    assert ["content" in line for line in lines[:TOKENS]] == [True] * TOKENS
    assert lines[TOKENS:] == ["data: [DONE]", ""]


async def test_the_frontend_hears_the_engines_kv_events_through_the_workers(stage: Stage) -> None:
    """Prompts whose blocks are on one engine each go to one worker each, time and again."""
    target = await stage.dynamo(PYTHON, "kv")
    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    names = "abcd"[: len(stage.urls)]
    for name, url in zip(names, stage.urls, strict=True):
        text = tokenizer.apply_chat_template(chat(name), add_generation_prompt=True, tokenize=False)
        tokens = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        async with stage.session.post(f"{url}/bench/store", json={"token_ids": tokens}) as response:
            assert response.status == 200

    async def chosen(name: str) -> int:
        text = await asked(stage, target, name, max_tokens=1, nvext={"extra_fields": ["worker_id"]})
        return int(json.loads(text)["nvext"]["worker_id"]["decode_worker_id"])

    async def is_known() -> bool:
        rounds = [[await chosen(name) for name in names] for _ in range(3)]
        return len(set(rounds[0])) == len(names) and rounds[1:] == [rounds[0]] * 2

    await until(is_known, "each prompt goes to the worker beside its engine", HEARD_S)
