"""What the operator lets be changed in a body is changed, and no other byte."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from router.headers import CATEGORY
from router.requests.api_call import ApiCall
from router.requests.endpoints import CHAT, COMPLETIONS, ENDPOINTS, Endpoint, parse
from router.requests.rewriting import Rewriting

RENAMES = Rewriting(aliases={"al": 'se"rved'})
ASKS = Rewriting(inject_usage=True)


def call(body: bytes, endpoint: Endpoint = COMPLETIONS, **headers: str) -> ApiCall:
    """As received."""
    return parse(endpoint, body, headers, request_id="r")


def _chat(turns: int) -> bytes:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * turns
    return json.dumps(
        {"model": "m", "messages": [*messages, {"role": "user", "content": "z"}]}
    ).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"al","prompt":"x"}', b'{"model":"se\\"rved","prompt":"x"}'),
        (
            b' {"prompt": "x" ,\n "model" :\t"al" } ',
            b' {"prompt": "x" ,\n "model" :\t"se\\"rved" } ',
        ),
        (
            b'{"x":{"model":"al"},"y":["model",{"model":1}],"prompt":"\\"model\\":1","model":"al"}',
            (
                b'{"x":{"model":"al"},"y":["model",{"model":1}],"prompt":"\\"model\\":1",'
                b'"model":"se\\"rved"}'
            ),
        ),
        (b'{"\\u006dodel":"al","prompt":"x"}', b'{"\\u006dodel":"se\\"rved","prompt":"x"}'),
        (b'{"model":"zz","model":"al","prompt":"x"}', None),
        (b'{"model":"m","prompt":"al"}', b'{"model":"m","prompt":"al"}'),
    ],
)
def test_a_models_name_is_replaced_where_it_stands(body: bytes, expected: bytes | None) -> None:
    """Wherever the key stands, however it is written; names inside values are not touched."""
    made = RENAMES.apply(call(body))
    if expected is not None:
        assert made.body == expected
    assert made.model == json.loads(made.body)["model"]


def test_no_alias_stands_for_a_missing_model() -> None:
    """The engine would use its base model, whatever the router took the request to be for."""
    unnamed = call(b'{"input":"x"}', ENDPOINTS["/v1/embeddings"])
    assert Rewriting(aliases={"": "served"}).apply(unnamed) is unnamed


def test_an_alias_in_a_form() -> None:
    """The field is replaced, and the file beside it stays as it is."""
    head = b'--X\r\nContent-Disposition: form-data; name="model"\r\nX-Y: 1\r\n\r\n'
    rest = b'\r\n--X\r\nContent-Disposition: form-data; name="file"\r\n\r\nal\r\n--X--\r\n'
    endpoint = ENDPOINTS["/v1/audio/transcriptions"]
    form = {"Content-Type": "multipart/form-data; boundary=X"}
    made = RENAMES.apply(call(head + b"al" + rest, endpoint, **form))
    assert made.body == head + b'se"rved' + rest
    assert made.model == 'se"rved'


def test_a_file_is_not_searched_for_the_model() -> None:
    """What looks like the field in it stays, and a long one of that kind holds nobody up."""
    looks = b'name="model"\r\n' * 200_000
    body = (
        b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        b'; name="model"\r\n\r\nal\r\n' + looks + b"\r\n"
        b"--X\r\nContent-Disposition: form-data; name=model\r\n\r\n%s\r\n--X--\r\n"
    )
    endpoint = ENDPOINTS["/v1/audio/transcriptions"]
    form = {"Content-Type": "multipart/form-data; boundary=X"}
    made = RENAMES.apply(call(body.replace(b"%s", b"al"), endpoint, **form))
    assert made.body == body.replace(b"%s", b'se"rved')


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=60)
@given(
    # No name of a field that means something, as `n` does.
    fields=st.dictionaries(st.text(max_size=4).map("x-{}".format), JSON, max_size=5),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)
def test_the_rest_stays_what_it_was(
    fields: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    """Any body means the same but for the model and the asked usage; bytes around them stay."""
    fields = fields | {"model": "al", "prompt": "x", "stream": True}
    raw = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode()
    both = Rewriting(aliases={"al": "served"}, inject_usage=True)
    made = both.apply(call(raw))
    expected = fields | {"model": "served", "stream_options": {"include_usage": True}}
    assert json.loads(made.body) == expected
    at = raw.rindex(b'"al"')
    assert made.body.startswith(raw[:at])


@pytest.mark.parametrize(
    ("options", "expected", "hides"),
    [
        (None, {"include_usage": True}, True),
        ({}, {"include_usage": True}, True),
        ({"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}, True),
        ({"include_usage": True}, {"include_usage": True}, False),
    ],
)
def test_usage_is_asked_for_once(
    options: dict[str, Any] | None, expected: dict[str, Any], hides: bool
) -> None:
    """Who asks gets it; for others the router asks and keeps it."""
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
    made = ASKS.apply(call(json.dumps(fields | {"stream_options": options}).encode(), CHAT))
    assert (json.loads(made.body)["stream_options"], made.hides_usage) == (expected, hides)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COMPLETIONS, b'{"model":"m","prompt":"x"}'),
        (ENDPOINTS["/v1/responses"], b'{"model":"m","input":"x","stream":true}'),
    ],
)
def test_no_usage_is_asked_for_where_it_comes_anyway(endpoint: Endpoint, body: bytes) -> None:
    """Plain answers and other APIs always tell it."""
    made = ASKS.apply(call(body, endpoint))
    assert (made.body, made.hides_usage) == (body, False)


def test_by_default_nothing_is_changed() -> None:
    """The very same call."""
    made = call(b'{"model":"al","prompt":"x","stream":true}')
    assert Rewriting().apply(made) is made


@pytest.mark.parametrize(
    ("endpoint", "body", "headers", "told"),
    [
        (CHAT, _chat(0), {}, ["chat:0"]),
        (CHAT, _chat(3), {}, ["chat:3"]),
        (CHAT, _chat(20), {}, ["chat:8"]),
        (COMPLETIONS, b'{"model":"m","prompt":"x"}', {"x-timestable-turn": "2"}, ["text:2"]),
        (CHAT, _chat(1), {"X-Timestable-Category": "search:1"}, ["search:1"]),
        (ENDPOINTS["/v1/embeddings"], b'{"model":"m","input":"x"}', {}, []),
    ],
)
def test_engines_are_told_type_and_turn(
    endpoint: Endpoint, body: bytes, headers: dict[str, str], told: list[str]
) -> None:
    """Of what generates, in a header, unless the client says better; the body stays as it is."""
    made = parse(endpoint, body, CIMultiDict(headers), request_id="r")
    changed = Rewriting(tell_category=True).apply(made)
    assert [value for name, value in changed.headers if name.lower() == CATEGORY] == told
    assert changed.body == body
