"""Requests for gpt-oss become the text that vLLM 0.32 makes of them.

The golden file is recorded by tests/vllm/harmony_truth.py from vLLM's own code.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import byte_level
from transformers import PreTrainedTokenizerFast

from indexer.contract.block_hash import pack_tokens
from router.errors import DegradedCause, TokensUnknown
from router.requests.api_call import ChatPrompt
from router.requests.endpoints import ENDPOINTS, parse
from router.tokens.harmony import MARKS, rendered
from router.tokens.harmony_tools import NESTED_MAX, Unrenderable, tools_section
from router.tokens.loaded import LoadedTokenizer

GOLDEN = Path(__file__).parents[3] / "golden/vllm_0_32_harmony.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
DATE = "2026-11-30"

NOT_KNOWN = {
    "harmony a schema with oneOf",
    "harmony a special token in a text",
    "responses: tools that no template sees",  # where the engine has a server for them
}
"""What vLLM renders and this router does not dare to."""


def prompt_of(case: dict[str, Any]) -> ChatPrompt:
    """What the router understands of a request."""
    body = json.dumps(case["body"]).encode()
    prompt = parse(ENDPOINTS[case["path"]], body, {}, request_id="r").prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_body_becomes_the_engines_text(case: dict[str, Any]) -> None:
    """To the character; what vLLM refuses, and what is not known for sure, is not rendered."""
    prompt = prompt_of(case)
    assert prompt.said is not None
    made = None
    try:
        texts = rendered(prompt.said, tools=prompt.tools, effort=prompt.effort, date=DATE)
        made = "".join(texts)
    except Unrenderable:
        pass
    assert made == (None if case["name"] in NOT_KNOWN else case["made"])


def test_a_tokenizer_with_the_formats_marks_makes_no_use_of_its_template(tmp_path: Path) -> None:
    """Ids of the texts, one after the other; what vLLM renders by a template is rendered by it."""
    made = byte_level((*sorted(MARKS), "<|return|>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(tmp_path)
    loaded = LoadedTokenizer.load(str(tmp_path), cache_bytes_max=1 << 20)
    assert loaded.harmony
    prompt = prompt_of(next(case for case in CASES if case["name"] == "harmony parts"))
    assert prompt.said is not None
    texts = loaded.texts(prompt)
    assert texts[1:] == rendered(prompt.said, tools=None, effort=None, date=DATE)[1:]
    assert len(texts) == 3
    ids = [made.encode(text, add_special_tokens=False).ids for text in texts]
    assert ids[0] + ids[1] != made.encode(texts[0] + texts[1], add_special_tokens=False).ids
    expected = (b"".join(map(pack_tokens, ids)),)
    assert loaded.encode(prompt) == expected
    assert loaded.ids_at_once(prompt, texts) == expected
    assert loaded.texts(ChatPrompt(messages=[{"role": "user", "content": "hi"}])) == ("hi",)


def test_what_is_not_known_for_sure_has_no_ids(tmp_path: Path) -> None:
    """Such a prompt is looked up by its text, and counted."""
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(tuple(sorted(MARKS))))
    fast.save_pretrained(tmp_path)
    loaded = LoadedTokenizer.load(str(tmp_path), cache_bytes_max=1 << 20)
    for name in sorted(NOT_KNOWN):
        prompt = prompt_of(next(case for case in CASES if case["name"] == name))
        with pytest.raises(TokensUnknown) as unknown:
            loaded.encode(prompt)
        assert unknown.value.cause is DegradedCause.TEMPLATE_FAILED


@pytest.mark.parametrize("outer", ["object", "array"])
def test_schemas_within_each_other_are_not_followed_for_ever(outer: str) -> None:
    """Each level copies all that is inside: a small body would take minutes."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(NESTED_MAX):
        allowed = schema
        inner = {"properties": {"a": schema}} if outer == "object" else {"items": schema}
        schema = {"type": outer, **inner}
    tools_section([{"type": "function", "function": {"name": "f", "parameters": allowed}}])
    with pytest.raises(Unrenderable, match="within each other"):
        tools_section([{"type": "function", "function": {"name": "f", "parameters": schema}}])


def test_many_required_names_are_not_compared_one_by_one() -> None:
    """Twice the names take about twice the time, not four times: 30,000 would take a minute."""
    names = [f"p{number}" for number in range(30_000)]
    parameters = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": [f"q{name}" for name in names],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    began_s = time.process_time()
    shown = tools_section([tool])
    assert time.process_time() - began_s < 5.0
    assert shown.count("?: string") == len(names)
