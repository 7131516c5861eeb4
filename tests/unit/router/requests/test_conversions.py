"""Chats, responses and messages become what vLLM 0.32 makes of them.

The golden file is recorded by tests/vllm/record_conversions.py from vLLM's own code.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from router.requests.api_call import ChatPrompt
from router.requests.endpoints import ENDPOINTS, parse
from router.tokens.chat_template import conversation

GOLDEN = Path(__file__).parents[3] / "golden/vllm_0_32_conversions.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
FLAGS = ("add_generation_prompt", "continue_final_message")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_body_becomes_the_engines_conversation(case: dict[str, Any]) -> None:
    """Messages in both forms of content, tools and arguments of the template, keys in order."""
    body = json.dumps(case["body"]).encode()
    call = parse(ENDPOINTS[case["path"]], body, {}, request_id="r")
    prompt = call.prompt
    assert isinstance(prompt, ChatPrompt)
    made = case["made"]
    for form, iterates_parts in (("string", False), ("openai", True)):
        shown = conversation(prompt.messages, iterates_parts=iterates_parts)
        assert shown == made[form]
        calls = [json.dumps(message.get("tool_calls")) for message in shown]
        assert calls == [json.dumps(message.get("tool_calls")) for message in made[form]]
    assert json.dumps(prompt.tools) == json.dumps(made["tools"])
    flags = {name: getattr(prompt, name) for name in FLAGS}
    assert prompt.template_kwargs | flags == made["kwargs"]
