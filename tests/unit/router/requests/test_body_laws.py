"""Whatever JSON comes to an endpoint, it is a call or a refusal with words.

Bodies that are right, as the golden file of conversions has them and as they stand here, with any
one value replaced by any other kind, or left out.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import RequestInvalid
from router.requests.endpoints import ENDPOINTS, OTHER, Endpoint, parse

GOLDEN = Path(__file__).parents[3] / "golden/vllm_0_32_conversions.json"

IMAGE = {"type": "image", "source": {"type": "base64", "data": "AA"}}
MORE: dict[str, Any] = {
    "/v1/completions": {"prompt": ["a", "b"], "stream_options": {"x": 1}, "suffix": "s"},
    "/v1/messages": {
        "max_tokens": 1,
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
        "kv_transfer_params": {"prompt_token_ids": [1]},
        "tools": [{"name": "f", "input_schema": {}}],
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE, IMAGE]}]},
            {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}]}]},
        ],
    },
    "/v1/embeddings": {"input": [{"role": "user", "content": "x"}], "padding": "x"},
    "/pooling": {"data": {"x": 1}, "task": "plugin"},
    "/v2/embed": {"texts": ["a"], "inputs": [{"content": []}]},
    "/score": {"text_1": ["a"], "text_2": [{"content": [{"type": "text", "text": "b"}]}]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "/inference/v1/generate": {
        "token_ids": [1, 2],
        "sampling_params": {"n": 1, "skip_reading_prefix_cache": None},
        "features": {"mm_hashes": {"image": ["x"]}},
    },
    "/v1/anything": {"stream": True},
}
OTHERS: tuple[Any, ...] = (None, True, 7, -1.5, "", "x", [], ["x"], [[1]], {}, {"type": "text"})


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and body of requests that are right."""
    for case in json.loads(GOLDEN.read_text()):
        yield case["path"], case["body"]
    for path, body in MORE.items():
        yield path, {"model": "m"} | body


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key in a body."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def outcome(path: str, body: bytes) -> str:
    """What became of a body, in words."""
    endpoint = ENDPOINTS.get(path, OTHER)
    try:
        made = parse(endpoint, body, {"Content-Type": "x"}, request_id="r", path=path)
    except RequestInvalid as error:
        return str(error)
    assert made.body == body
    assert made.prompts_count >= 1
    return f"it is a call for {made.endpoint}"


@pytest.mark.parametrize("path", sorted({path for path, _ in bodies()}))
def test_no_single_wrong_value_is_a_defect(path: str) -> None:
    """Of every kind, at every place, and no value there at all."""
    tried = 0
    for _, right in (one for one in bodies() if one[0] == path):
        body = copy.deepcopy(right)
        for holder, key in list(places(body)):
            kept = holder[key]
            for other in OTHERS:
                holder[key] = other
                assert len(outcome(path, json.dumps(body).encode())) > 10, body
                tried += 1
            if isinstance(holder, dict):
                del holder[key]
                assert len(outcome(path, json.dumps(body).encode())) > 10, body
            holder[key] = kept
    assert tried >= len(OTHERS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(endpoint=st.sampled_from([*ENDPOINTS.values(), OTHER]), body=JSON)
def test_no_json_is_a_defect(endpoint: Endpoint, body: Any) -> None:
    """An object or not."""
    assert len(outcome(endpoint.path, json.dumps(body).encode())) > 10
