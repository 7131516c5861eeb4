"""Bodies become calls, or messages that name the field and say what is expected."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.contract.block_hash import pack_tokens
from router.errors import RequestInvalid
from router.requests.api_call import ApiCall, ChatPrompt, OpaquePrompt, TextPrompt, TokenPrompt
from router.requests.endpoints import ROUTE, parse
from router.requests.received import request_id

MESSAGE = {"role": "user", "content": "hi"}


def call(body: Any, headers: dict[str, str] | None = None) -> ApiCall:
    """Parse a body given as bytes or as what JSON makes of it."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(ROUTE, raw, headers or {}, request_id="r")


def refusal(body: Any) -> tuple[str | None, str]:
    """(param, message) of a body that is refused."""
    with pytest.raises(RequestInvalid) as caught:
        call(body)
    return caught.value.param, str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": "x", "prompt_logprobs": None, "logprobs": 3}, True),
        ({"prompt": "x", "prompt_logprobs": 0}, False),
        ({"prompt": "x", "echo": True}, True),
        ({"prompt": "x", "echo": True, "logprobs": 1}, False),
        ({"messages": [MESSAGE], "prompt_logprobs": 1}, False),
        ({"messages": [MESSAGE], "logprobs": True, "top_logprobs": 5}, True),
        ({"messages": [MESSAGE], "echo": True}, False),
        ({"messages": [MESSAGE], "echo": True, "top_logprobs": None}, True),
    ],
)
def test_log_probabilities_of_the_prompt_are_noticed(fields: dict[str, Any], reads: bool) -> None:
    """With them the engine reuses nothing; an echo asks for them where log probabilities are."""
    assert call({"model": "m", **fields}).reads_prefixes is reads


def test_a_chat_is_what_its_template_sees() -> None:
    """Of messages what vLLM passes on, in its order; defaults are vLLM's."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "name": "b", "y": 2},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "why",
            "tool_calls": [
                {
                    "type": "function",
                    "index": 0,
                    "function": {"name": "f", "arguments": '{"q": 1}'},
                    "id": "1",
                }
            ],
        },
        {"role": "tool", "content": "b", "tool_call_id": "1"},
    ]
    parsed = call(
        {
            "model": "m",
            "messages": messages,
            "stream": True,
            "cache_salt": "s",
            "max_completion_tokens": 5,
            "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"},
            "reasoning_effort": "low",
        }
    )
    tool_call = {
        "id": "1",
        "function": {"arguments": {"q": 1}, "name": "f"},
        "type": "function",
        "index": 0,
    }
    assert parsed.prompt == ChatPrompt(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [tool_call],
                "reasoning": "why",
                "reasoning_content": "why",
            },
            {"role": "tool", "content": "b", "tool_call_id": "1"},
        ],
        template_kwargs={"enable_thinking": False, "reasoning_effort": "low"},
    )
    assert isinstance(parsed.prompt, ChatPrompt)
    assert json.dumps(parsed.prompt.messages[1]["tool_calls"][0]) == json.dumps(tool_call)
    assert (parsed.turn, parsed.stream, parsed.cache_salt, parsed.output_tokens_max) == (
        1,
        True,
        "s",
        5,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "tool", "content": [{"type": "tool_reference", "name": "f"}]}]},
        {"messages": [MESSAGE], "chat_template": "x"},
        {"messages": [MESSAGE], "truncate_prompt_tokens": 5, "truncation_side": "right"},
        {"messages": [MESSAGE], "kv_transfer_params": {"prompt_token_ids": [1]}},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "prompt_embeds": "abc="},
        {"prompt_embeds": "abc="},
        {"prompt": [1, 2], "truncate_prompt_tokens": 1, "truncation_side": "right"},
    ],
)
def test_what_only_the_engine_can_tokenize_is_opaque(fields: dict[str, Any]) -> None:
    """Its token ids are not guessed."""
    assert isinstance(call({"model": "m", **fields}).prompt, OpaquePrompt)


def test_an_opaque_conversation_is_its_pieces_in_order() -> None:
    """Roles, texts, and media by what they are, not by where their keys stand."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "x"}}
    same = {"image_url": {"detail": "x", "url": "data:image/png;base64,AAAA"}, "type": "image_url"}
    prompts = []
    for one in (image, same, image | {"image_url": {"url": "data:image/png;base64,AAAB"}}):
        content = [{"type": "text", "text": "look"}, one]
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
        prompt = call({"model": "m", "messages": messages}).prompt
        assert isinstance(prompt, OpaquePrompt)
        prompts.append(prompt)
    assert prompts[0].pieces[:4] == ("system", "s", "user", "look")
    assert prompts[0] == prompts[1] != prompts[2]
    assert (prompts[0].media_count, prompts[0].texts_bytes) == (1, 5)
    assert len(prompts[0].pieces[4]) < 64


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", TextPrompt(texts=("hi",))),
        (["a", "b"], TextPrompt(texts=("a", "b"))),
        ([1, 2], TokenPrompt(packed=(pack_tokens([1, 2]),))),
        ([[1], [2, 3]], TokenPrompt(packed=(pack_tokens([1]), pack_tokens([2, 3])))),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, expected: TextPrompt | TokenPrompt) -> None:
    """Text or token ids, one or several."""
    parsed = call({"model": "m", "prompt": prompt})
    assert parsed.prompt == expected
    texts = expected.texts if isinstance(expected, TextPrompt) else expected.packed
    assert parsed.prompts_count == len(texts)


def test_the_body_is_kept_byte_for_byte() -> None:
    """Spaces, order and numbers as they came."""
    raw = b'{ "prompt" : "x", "model":"m", "temperature": 1.50 }'
    assert call(raw).body == raw


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "empty"),
        (b'{"a"', None, "not valid JSON"),
        (b"[" * 100_000, None, "not valid JSON"),
        (b'{"model": "\xff"}', None, "not valid JSON"),
        ([1], None, "must be a JSON object, not a list"),
        ({"messages": [MESSAGE]}, "model", "model: is required"),
        ({"model": 3, "messages": [MESSAGE]}, "model", "must be a string (got the number 3)"),
        ({"model": "m", "messages": []}, "messages", "messages: must not be empty"),
        ({"model": "m", "messages": "x"}, "messages", "must be a list (got a string)"),
        ({"model": "m", "messages": ["x"]}, "messages[0]", "must be an object (got a string)"),
        (
            {"model": "m", "messages": [MESSAGE, {"role": "user", "content": 5}]},
            "messages[1].content",
            "must be a string or a list of content parts (got the number 5)",
        ),
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
            "is required",
        ),
        ({"model": "m", "messages": [{"content": "x"}]}, "messages[0].role", "is required"),
        ({"model": "m", "messages": [MESSAGE], "stream": "yes"}, "stream", "true or false"),
        ({"model": "m", "messages": [MESSAGE], "n": 0}, "n", "greater than or equal to 1"),
        ({"model": "m", "messages": [MESSAGE], "tools": {}}, "tools", "must be a list"),
        (
            {"model": "m", "messages": [MESSAGE], "continue_final_message": True},
            "continue_final_message",
            "add_generation_prompt",
        ),
        ({"model": "m"}, "prompt", "is required"),
        ({"model": "m", "prompt": ""}, "prompt", "must not be empty"),
        ({"model": "m", "prompt": []}, "prompt", "must not be empty"),
        ({"model": "m", "prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
        ({"model": "m", "prompt": ["a", [1]]}, "prompt[1]", "strings only, or lists of ids only"),
        ({"model": "m", "prompt": [1, -1]}, "prompt", "token ids"),
        ({"model": "m", "prompt": [1, 2.5]}, "prompt", "token ids"),
        ({"model": "m", "prompt": [1, True]}, "prompt", "token ids"),
        ({"model": "m", "prompt": [[1], [False]]}, "prompt[1]", "token ids"),
        ({"model": "m", "prompt": [[1], [1 << 32]]}, "prompt[1]", "token ids"),
        ({"model": "m", "prompt": 5}, "prompt", "got the number 5"),
        ({"model": "m", "prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        ({"model": "m", "prompt": "x", "max_tokens": "5"}, "max_tokens", "must be an integer"),
        ({"model": "m", "prompt": "x", "cache_salt": ""}, "cache_salt", "must not be empty"),
        ({"model": "m", "prompt": "x", "stop": 5}, "stop", "a list of strings"),
        ({"model": "m", "prompt": "x", "stop": ["a", 1]}, "stop[1]", "must be a string"),
        ({"model": "m", "prompt": "x", "priority": "high"}, "priority", "must be an integer"),
        ({"model": "m", "prompt": "x", "ignore_eos": "yes"}, "ignore_eos", "true or false"),
        ({"model": "m", "prompt": "x", "top_k": 1.5}, "top_k", "must be an integer"),
        ({"model": "m", "prompt": "x", "frequency_penalty": "x"}, "frequency_penalty", "number"),
    ],
)
def test_what_is_wrong_is_named(body: Any, param: str | None, words: str) -> None:
    """The message says which field, and what to change."""
    found_param, message = refusal(body)
    assert found_param == param
    assert words in message


def test_many_problems_are_cut_short() -> None:
    """A message stays readable."""
    _, message = refusal({"model": 1, "messages": 2, "n": 0, "stream": 4, "seed": "x"})
    assert message.count(";") == 3
    assert message.endswith("and 2 more.")


def test_headers_that_matter() -> None:
    """Session, policy and explanation come from headers."""
    headers = {"x-session-id": "s 1", "x-timestable-policy": "linear", "x-timestable-explain": "1"}
    parsed = call({"model": "m", "prompt": "x"}, headers)
    assert (parsed.session_id, parsed.policy, parsed.explain) == ("s 1", "linear", True)


@pytest.mark.parametrize("given_id", ["", "a b", "a\r\nb", "x" * 129, "\u00e9"])
def test_an_unfit_request_id_is_replaced(given_id: str) -> None:
    """Nobody writes into our logs and headers."""
    made = request_id({"x-request-id": given_id})
    assert made != given_id
    assert len(made) == 32


def test_a_fit_request_id_is_kept() -> None:
    """The client finds its request again."""
    assert request_id({"x-request-id": "abc/1:2"}) == "abc/1:2"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "stream", "n", "tools", "role", "content", "type", "text"]
)


@settings(max_examples=25)
@given(st.dictionaries(FIELDS, JSON | st.lists(st.dictionaries(FIELDS, JSON, max_size=3))))
def test_no_body_is_a_defect(fields: dict[str, Any]) -> None:
    """Whatever JSON comes, the result is a call or a refusal with words."""
    try:
        parsed = call(fields)
    except RequestInvalid as error:
        words = str(error)
    else:
        words = f"it is a call for {parsed.model}"
    assert len(words) > 10
