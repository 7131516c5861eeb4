"""Bodies: what is accepted, what is refused and in which words."""

import json

import pytest

from workers.simulated.errors import ApiError
from workers.simulated.protocol import Body, parse_generation, parse_messages, parse_prompts
from workers.simulated.request import pack_tokens


def body(**fields: object) -> Body:
    """A parsed body."""
    return Body(json.dumps(fields).encode())


def parse(fields: dict[str, object]) -> None:
    """All parsing a call goes through."""
    parsed = body(**fields)
    parse_generation(parsed, chat="messages" in fields)
    if "messages" in fields:
        parse_messages(parsed)
    else:
        parse_prompts(parsed, vocabulary_size=100)


def refusal(**fields: object) -> dict[str, object]:
    """The error of a body that must not pass."""
    with pytest.raises(ApiError) as caught:
        parse(fields)
    error = caught.value.body()["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", ["a b"]),
        ([1, 2], [pack_tokens([1, 2])]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [pack_tokens([1]), pack_tokens([2, 3])]),
    ],
)
def test_all_four_forms_of_a_prompt_are_taken(prompt: object, expected: list) -> None:
    """Text, ids, texts, lists of ids."""
    assert parse_prompts(body(prompt=prompt), vocabulary_size=100) == expected


@pytest.mark.parametrize(
    "prompt", [None, "", [], 7, {}, [1, "a"], [-1], [1.5], [1 << 40], ["a", 1], [[1], []], [[1], 2]]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    """Every other shape is a 400 in vLLM's form."""
    error = refusal(prompt=prompt)
    assert (error["code"], set(error)) == (400, {"message", "type", "param", "code"})


def test_token_id_beyond_the_vocabulary_is_named() -> None:
    """VLLM's words for an id the model does not have."""
    assert refusal(prompt=[5, 100])["message"] == "Token id 100 is out of vocabulary"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "7"),
        ("max_tokens", True),
        ("stream", "yes"),
        ("model", 3),
        ("stop", [1]),
        ("cache_salt", 5),
        ("seed", 1.5),
        ("stream_options", []),
        ("priority", "high"),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", []),
        ("top_k", 1.5),
        ("presence_penalty", {}),
    ],
)
def test_wrong_type_names_its_field(field: str, value: object) -> None:
    """The message and `param` say which field to change."""
    error = refusal(prompt="x", **{field: value})
    assert (error["type"], error["param"]) == ("Bad Request", field)
    assert field in str(error["message"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", 0, "max_tokens must be at least 1, got 0."),
        ("n", 0, "n must be between 1 and 1024, got 0."),
        ("n", 16_385, "n must be between 1 and 1024, got 16385."),
        ("temperature", -1, "temperature must be in [0, 2], got -1."),
        ("temperature", 2.5, "temperature must be in [0, 2], got 2.5."),
        ("temperature", float("nan"), "temperature must be in [0, 2], got nan."),
        ("top_p", 0, "top_p must be in (0, 1], got 0."),
        ("top_p", 1.5, "top_p must be in (0, 1], got 1.5."),
        ("min_p", -0.5, "min_p must be in [0, 1], got -0.5."),
        ("presence_penalty", 3, "presence_penalty must be in [-2, 2], got 3."),
        ("frequency_penalty", -3, "frequency_penalty must be in [-2, 2], got -3."),
        (
            "repetition_penalty",
            0,
            "repetition_penalty must be greater than zero, and finite, got 0.",
        ),
        ("top_k", -2, "top_k must be 0 (disable), or at least 1."),
        ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1."),
        ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ("stop", "", "stop cannot contain an empty string."),
        ("stop", ["a", ""], "stop cannot contain an empty string."),
        ("cache_salt", "", "Parameter 'cache_salt' must have 1 to 1024 characters."),
        ("echo", True, "`echo` is not supported by the simulated engine."),
        ("logprobs", 1, "`logprobs` is not supported by the simulated engine."),
        (
            "stream_options",
            {"include_usage": True},
            "Stream options can only be defined when `stream=True`.",
        ),
    ],
)
def test_value_out_of_range_is_explained(field: str, value: object, message: str) -> None:
    """Values that parse and cannot be served."""
    error = refusal(prompt="x", **{field: value})
    assert (error["message"], error["type"]) == (message, "BadRequestError")


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"null", b"[" * 100_000])
def test_malformed_json_is_a_bad_request(raw: bytes) -> None:
    """Whatever the bytes, the answer is a 400 with a reason."""
    with pytest.raises(ApiError) as caught:
        Body(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "messages", [[], "hi", [1], [{"content": "no role"}], [{"role": "user", "content": 3}]]
)
def test_malformed_messages_are_refused(messages: object) -> None:
    """Empty or misshapen conversations do not reach the template."""
    assert refusal(messages=messages)["code"] == 400


def test_image_parts_are_refused() -> None:
    """A text model says so."""
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    error = refusal(messages=[{"role": "user", "content": parts}])
    assert "text parts only" in str(error["message"])


def test_text_parts_are_joined_by_newlines() -> None:
    """Content in parts is flattened as vLLM does for text templates."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = parse_messages(body(messages=[{"role": "user", "content": parts}]))
    assert chat.messages[0]["content"] == "a\nb"


def test_unknown_fields_are_ignored() -> None:
    """New client fields do no harm."""
    assert parse_generation(body(prompt="x", brand_new=1), chat=False).choice_count == 1


def test_max_completion_tokens_wins_in_chat() -> None:
    """The newer name decides when both are given."""
    call = parse_generation(body(max_tokens=5, max_completion_tokens=3), chat=True)
    assert call.max_tokens == 3


def test_completion_length_defaults_to_sixteen() -> None:
    """OpenAI's default for text completions; chat leaves it to the server."""
    lengths = [parse_generation(body(), chat=chat).max_tokens for chat in (False, True)]
    assert lengths == [16, None]


def test_sampling_parameters_within_bounds_pass() -> None:
    """Ends of the ranges, whole numbers and null are fine."""
    call = parse_generation(
        body(temperature=0, top_p=1, top_k=-1, min_p=None, presence_penalty=-2.0), chat=True
    )
    assert call.choice_count == 1


def test_endless_number_is_out_of_bounds() -> None:
    """Integers that no float can hold are answered like other large ones."""
    assert refusal(prompt="x", temperature=10**400)["param"] == "temperature"
