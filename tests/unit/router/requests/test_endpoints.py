"""Every endpoint's bodies become calls, or messages that name the field."""

import json
from typing import Any

import pytest

from indexer.contract.block_hash import pack_tokens
from router.errors import Forbidden, RequestInvalid
from router.requests.api_call import (
    ApiCall,
    ChatPrompt,
    Cost,
    OpaquePrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from router.requests.chat_messages import opaque_conversation
from router.requests.endpoints import ENDPOINTS, OTHER, parse

USER = {"role": "user", "content": "hi"}
CHAT = ChatPrompt(messages=[USER])
SAID = ChatPrompt(messages=[USER], merges_system=True)
POOLED = ChatPrompt(messages=[USER], add_generation_prompt=False)


def call(path: str, body: Any, **headers: str) -> ApiCall:
    """Parse a body given as bytes or as what JSON makes of it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(ENDPOINTS.get(path, OTHER), raw, headers, request_id="r", path=path)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/responses", {"input": "hi"}, CHAT),
        ("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}, OpaquePrompt),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, OpaquePrompt),
        ("/v1/responses", {"input": [{"role": "assistant", "content": []}]}, OpaquePrompt),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1}, SAID),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    USER,
                    {"role": "system", "content": [{"type": "text", "text": "x"}]},
                    {"role": "system", "content": "x-anthropic-billing-header: 1\nx"},
                    {"role": "system", "content": ""},
                ],
            },
            ChatPrompt(messages=[USER, {"role": "system", "content": "x"}], merges_system=True),
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    USER,
                    {"role": "system", "content": [{"type": "tool_removal", "tool": {}}]},
                ],
            },
            OpaquePrompt,
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {}}, USER]}],
            },
            RequestInvalid,
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"data": "AA"}}]}
                ],
            },
            OpaquePrompt,
        ),
        ("/v1/embeddings", {"input": "a"}, TextPrompt(texts=("a",))),
        ("/v1/embeddings", {"input": ["a", "b"]}, TextPrompt(texts=("a", "b"))),
        ("/v1/embeddings", {"input": [1, 2]}, TokenPrompt(packed=(pack_tokens([1, 2]),))),
        ("/v1/embeddings", {"messages": [USER]}, POOLED),
        ("/v1/embeddings", {"input": [USER]}, POOLED),
        ("/v1/embeddings", {"input": [[USER], [USER]]}, OpaquePrompt),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}, OpaquePrompt),
        ("/v1/embeddings", {"input": ""}, RequestInvalid),
        ("/v1/embeddings", {}, RequestInvalid),
        ("/pooling", {"data": {"x": 1}}, OpaquePrompt),
        (
            "/classify",
            {"input": "a", "add_special_tokens": False},
            TextPrompt(texts=("a",), add_special_tokens=False),
        ),
        ("/v2/embed", {"texts": ["a", "b"]}, OpaquePrompt(pieces=("a", "b"), texts_bytes=2)),
        (
            "/score",
            {"text_1": "q", "text_2": ["a", "b"]},
            OpaquePrompt(pieces=("q", "a", "b"), texts_bytes=3),
        ),
        (
            "/v1/rerank",
            {"query": "q", "documents": ["a", {"text": "b"}]},
            OpaquePrompt(pieces=("q", "a", "{'text': 'b'}"), texts_bytes=15),
        ),
        ("/v2/rerank", {"query": "q"}, RequestInvalid),
        (
            "/generative_scoring",
            {"query": "q", "items": ["a", "b"]},
            OpaquePrompt(pieces=("q", "a", "b"), texts_bytes=3),
        ),
        (
            "/cohere/v2/chat",
            {"messages": [USER], "documents": ["d"]},
            OpaquePrompt(pieces=('[["d"], null]', "user", "hi"), texts_bytes=15),
        ),
        ("/cohere/v2/chat", {"message": "hi"}, RequestInvalid),
        ("/tokenize", {"prompt": "x"}, OpaquePrompt(pieces=())),
        ("/detokenize", {"tokens": [1]}, OpaquePrompt(pieces=())),
        (
            "/inference/v1/generate",
            {"token_ids": [1, 2], "sampling_params": {}},
            TokenPrompt(packed=(pack_tokens([1, 2]),)),
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "features": {"mm_hashes": {}}, "sampling_params": {}},
            OpaquePrompt,
        ),
        ("/inference/v1/generate", {"token_ids": [True], "sampling_params": {}}, RequestInvalid),
        ("/inference/v1/generate", {"token_ids": [1]}, RequestInvalid),
        ("/v1/whatever", {"model": "m", "x": 1}, OpaquePrompt),
    ],
)
def test_prompts_of_every_api(
    path: str, body: dict[str, Any], expected: Prompt | type[Prompt] | type[RequestInvalid]
) -> None:
    """Exact where the router can know the token ids, opaque where it cannot, else refused."""
    body = {"model": "m"} | body
    if expected is RequestInvalid:
        with pytest.raises(RequestInvalid):
            call(path, body)
        return
    made = call(path, body)
    assert made.model == "m"
    if isinstance(expected, type):
        assert isinstance(made.prompt, expected)
    else:
        assert made.prompt == expected


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (
            "/v1/responses",
            {"input": "hi", "stream": True, "max_output_tokens": 7, "cache_salt": "s"},
            {"stream": True, "output_tokens_max": 7, "cache_salt": "s", "prompt_field": "input"},
        ),
        ("/v1/responses", {"input": "x", "truncation": "auto"}, {"truncate_prompt_tokens": -1}),
        (
            "/v1/responses",
            {"input": "x", "enable_response_messages": True},
            {"tells_cached_tokens": False},
        ),
        (
            "/v1/messages",
            {"model": "m", "messages": [USER], "max_tokens": 9, "stream": True},
            {"stream": True, "output_tokens_max": 9},
        ),
        ("/v1/messages/count_tokens", {"model": "m", "messages": 1}, {"cost": Cost.NONE}),
        ("/v1/embeddings", {"input": "a"}, {"output_tokens_max": 0, "reads_prefixes": True}),
        ("/pooling", {"input": "a", "task": "token_embed"}, {"reads_prefixes": False}),
        ("/score", {"text_1": "q", "text_2": ["a", "b"]}, {"prompts_count": 2}),
        ("/score", {"text_1": ["q", "r"], "text_2": ["a", "b"]}, {"prompts_count": 2}),
        ("/tokenize", {"prompt": "x"}, {"cost": Cost.NONE, "model": ""}),
        (
            "/inference/v1/generate",
            {
                "token_ids": [1],
                "stream": True,
                "sampling_params": {"n": 2, "max_tokens": 3, "prompt_logprobs": 1},
            },
            {"choices_count": 2, "output_tokens_max": 3, "reads_prefixes": False, "stream": True},
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"skip_reading_prefix_cache": True}},
            {"reads_prefixes": False},
        ),
        ("/v1/files?x=1", b"", {"cost": Cost.NONE, "path": "/v1/files?x=1", "model": ""}),
        ("/v1/files", b"%PDF", {"cost": Cost.PREFILL, "model": ""}),
    ],
)
def test_what_else_routing_needs(path: str, body: Any, fields: dict[str, Any]) -> None:
    """Length, stream, salt, cost: as the engine will take them."""
    made = call(path, body)
    assert {name: getattr(made, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/responses", {"input": 5}, "input", "got the number 5"),
        ("/v1/responses", {}, "input", "is required"),
        ("/v1/responses", {"input": ["x"]}, "input[0]", "must be an object"),
        ("/v1/responses", {"input": "x", "tools": [1]}, "tools[0]", "must be an object"),
        ("/v1/responses", {"input": "x", "reasoning": {"effort": 1}}, "reasoning.effort", "string"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1}, "model", "is required"),
        ("/v1/messages", {"model": "m", "messages": [USER]}, "max_tokens", "is required"),
        (
            "/v1/messages",
            {"model": "m", "max_tokens": 1, "messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
            "'user', 'assistant' or 'system'",
        ),
        (
            "/v1/messages",
            {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [{}]}]},
            "messages[0].content[0].type",
            "is required",
        ),
        ("/v1/messages/count_tokens", {"messages": [USER]}, "model", "is required"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input[1]", "strings only"),
        ("/v1/embeddings", {"messages": []}, "messages", "must not be empty"),
        ("/score", {"text_1": "a"}, "query", "text_1 and text_2"),
        ("/tokenize", {"model": 5}, "model", "must be a string"),
        ("/inference/v1/generate", {"sampling_params": {}}, "token_ids", "is required"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"n": "2"}},
            "sampling_params.n",
            "must be an integer",
        ),
        ("/v1/x", {"model": 5}, "model", "must be a string"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: Any, param: str, words: str) -> None:
    """The message says which field, and what to change."""
    with pytest.raises(RequestInvalid) as caught:
        call(path, body)
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/transcriptions", "/tokenize"])
def test_a_compressed_body_is_refused_where_it_has_to_be_read(path: str) -> None:
    """The engine does not take it either; elsewhere it goes through."""
    with pytest.raises(RequestInvalid, match="Content-Encoding") as caught:
        call(path, b"\x1f\x8b", **{"Content-Encoding": "gzip"})
    assert caught.value.param == "Content-Encoding"
    assert call("/v1/x", b"\x1f\x8b", **{"Content-Encoding": "gzip"}).body == b"\x1f\x8b"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter?x=1",
        "/v1/load%5Flora%5fadapter",
        "/v1//load_lora_adapter/",
        "/v1/Load_LoRA_adapter",
    ],
)
def test_what_changes_an_engine_is_not_passed_on(path: str) -> None:
    """However it is written: any client could, and only one engine of many would change."""
    with pytest.raises(Forbidden, match="ask that engine"):
        call(path, {"lora_name": "x", "lora_path": "/"})
    assert call("/v1/load", {"model": "m"}).model == "m"


PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "/v1/chat/completions",
            {"messages": [USER | {"content": [PART] * 9_000}] * 2},
            "messages",
        ),
        ("/v1/messages", {"messages": [USER | {"content": [PART] * 16_385}]}, "messages"),
        ("/v1/responses", {"input": [USER | {"content": [PART] * 16_385}]}, "input"),
        ("/v1/embeddings", {"input": [USER | {"content": [PART] * 16_385}]}, "input"),
    ],
)
def test_a_conversation_has_a_bounded_number_of_parts(
    path: str, fields: dict[str, Any], param: str
) -> None:
    """Each is looked at several times, all messages' together."""
    with pytest.raises(RequestInvalid, match="content parts; at most 16384") as caught:
        call(path, {"model": "m", "max_tokens": 1} | fields)
    assert caught.value.param == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/anything"])
@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"a":1},'])
def test_a_body_of_countless_small_things_is_not_read(path: str, piece: bytes) -> None:
    """Reading holds up everybody; what stands within texts is nothing of that kind."""
    fields = b'{"model":"m","messages":[{"role":"user","content":"%s"}],"x":[%s0]}'
    with pytest.raises(RequestInvalid, match="lists, objects and fields"):
        call(path, fields % (b"a", piece * 300_000))
    text = (piece * 300_000).replace(b'"', b'\\"')
    assert call(path, fields % (text, b"")).model == "m"


def test_a_text_without_an_end_is_looked_through_once() -> None:
    """From each of its bytes on it would take hours."""
    half = b"[" * 140_000
    body = b'{"%s":%s"%s' % (half, half, b"a" * 4_000_000)
    with pytest.raises(RequestInvalid, match="not valid JSON"):
        call("/v1/chat/completions", body)


@pytest.mark.parametrize("body", [b"\xff[{:" * 400_000, b"[" * 300_000])
def test_other_paths_take_what_is_no_object(body: bytes) -> None:
    """Whatever its bytes are."""
    assert call("/v1/files", body).body == body


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/anything"]
)
def test_a_name_has_a_bounded_length(path: str) -> None:
    """It goes into logs."""
    fields = {"messages": [USER], "input": "x", "max_tokens": 1}
    with pytest.raises(RequestInvalid, match="at most 1024 characters") as caught:
        call(path, fields | {"model": "m" * 1025})
    assert caught.value.param == "model"


@pytest.mark.parametrize("content", [None, [{"type": "image_url", "image_url": "x"}]])
@pytest.mark.parametrize("depth", [*range(900, 1000, 7), 100_000])
def test_arguments_of_any_depth_are_no_defect(depth: int, content: Any) -> None:
    """Those of a tool call are JSON within JSON, where no reader has bounded the depth yet."""
    function = {"name": "f", "arguments": '{"a":' * depth + "1" + "}" * depth}
    message = {"role": "assistant", "content": content, "tool_calls": [{"function": function}]}
    assert call("/v1/chat/completions", {"model": "m", "messages": [message]}).turn == 1


def test_what_is_too_deep_to_be_written_is_left_out() -> None:
    """A thread with a short stack may have read arguments that a deep one cannot write."""
    arguments: dict[str, Any] = {}
    for _ in range(2_000):
        arguments = {"a": arguments}
    message = {"role": "assistant", "content": "x", "tool_calls": [{"function": arguments}]}
    assert opaque_conversation([message], None).pieces == ("assistant", "x", "")
