"""Predicted hits of responses, messages and generate against what real engines report."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from waiting import until

from tests.vllm.fleet import RealFleet
from tests.vllm.prompts import Prompts
from tests.vllm.settings import BLOCK, NAME

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180, func_only=True),
]

TURNS = 4


class Talk:
    """Asks one request after the other, each when all blocks of the one before are published."""

    def __init__(self, fleet: RealFleet) -> None:
        self._fleet = fleet
        self.predicted: list[int] = []
        self.actual: list[int] = []

    async def ask(
        self, path: str, body: Mapping[str, Any], await_blocks: bool = True
    ) -> Mapping[str, Any]:
        """The answer; what was predicted and what was true are noted."""
        before = await self._published()
        headers = {"x-timestable-explain": "1"}
        url = self._fleet.router_urls[0] + path
        async with self._fleet.session.post(url, json=body, headers=headers) as response:
            answer: dict[str, Any] = json.loads(await response.text())
            assert response.status == 200, answer
        decision = json.loads(response.headers["x-timestable-decision"])
        prompt_tokens, cached_tokens = counted(answer["usage"])
        assert prompt_tokens == decision["prompt_tokens"], "the router counts as the engine does"
        self.predicted.append(decision["hit_tokens"])
        self.actual.append(cached_tokens)
        new_blocks = prompt_tokens // BLOCK - cached_tokens // BLOCK if await_blocks else 0

        async def published() -> bool:
            return await self._published() - before >= new_blocks

        await until(published, "the prompt's blocks are in the index")
        return answer

    async def _published(self) -> float:
        workers = self._fleet.workers.values()
        return sum(
            [await self._fleet.metric(one, "published_blocks_total", "added") for one in workers]
        )


def counted(usage: Mapping[str, Any]) -> tuple[int, int]:
    """(prompt tokens, cached tokens) as each API tells them."""
    if "cache_read_input_tokens" in usage:
        cached = int(usage["cache_read_input_tokens"])
        new = int(usage["input_tokens"]) + int(usage.get("cache_creation_input_tokens", 0))
        return new + cached, cached
    side = "prompt_tokens" if "prompt_tokens" in usage else "input_tokens"
    return int(usage[side]), int(usage[f"{side}_details"]["cached_tokens"])


async def test_responses(fleet: RealFleet) -> None:
    """Instructions, answers in parts, tool calls and their results: every turn is exact."""
    talk, prompts = Talk(fleet), Prompts(31)
    items: list[dict[str, Any]] = []
    body = {"model": NAME, "instructions": prompts.words(40), "max_output_tokens": 4}
    for turn in range(TURNS):
        items.append({"role": "user", "content": prompts.words(30)})
        await talk.ask("/v1/responses", body | {"input": items})
        items += [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": prompts.words(20)}],
            },
            {
                "type": "function_call",
                "call_id": f"c{turn}",
                "name": "look",
                "arguments": '{"at": 1}',
            },
            {"type": "function_call_output", "call_id": f"c{turn}", "output": prompts.words(20)},
        ]
    assert talk.predicted == talk.actual
    assert talk.actual == sorted(talk.actual)
    assert talk.actual[-1] > 3 * BLOCK


async def test_anthropics_messages(fleet: RealFleet) -> None:
    """System blocks, thoughts, tools, results, system messages between others: exact."""
    talk, prompts = Talk(fleet), Prompts(32)
    messages: list[dict[str, Any]] = []
    system = [
        {"type": "text", "text": prompts.words(30)},
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
    ]
    body = {"model": NAME, "system": system, "max_tokens": 4}
    for turn in range(TURNS):
        blocks = [{"type": "text", "text": prompts.words(15)} for _ in range(2)]
        if turn:
            result = {"type": "tool_result", "tool_use_id": f"t{turn - 1}", "content": blocks}
            blocks = [result, *blocks]
        messages.append({"role": "user", "content": blocks})
        messages.append({"role": "system", "content": prompts.words(5)})
        await talk.ask("/v1/messages", body | {"messages": messages})
        messages.append(
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": prompts.words(5), "signature": "s"},
                    {"type": "text", "text": prompts.words(20)},
                    {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {"at": 1}},
                ],
            }
        )
    assert talk.predicted == talk.actual
    assert talk.actual[-1] > 3 * BLOCK


async def test_generate(fleet: RealFleet) -> None:
    """Token ids in: what was computed is found, and with prompt logprobs nothing is looked for."""
    talk, prompts = Talk(fleet), Prompts(33)
    ids = prompts.blocks(3)
    body = {"model": NAME, "token_ids": ids, "sampling_params": {"max_tokens": 2}}
    await talk.ask("/inference/v1/generate", body)
    await talk.ask("/inference/v1/generate", body | {"token_ids": [*ids, *prompts.ids(BLOCK)]})
    told = {"max_tokens": 2, "prompt_logprobs": 1}
    # An engine that holds the blocks computes them anew without storing new ones.
    await talk.ask("/inference/v1/generate", body | {"sampling_params": told}, await_blocks=False)
    assert talk.predicted == talk.actual == [0, 3 * BLOCK, 0]
