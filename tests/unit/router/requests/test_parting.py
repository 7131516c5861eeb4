"""What each leg of a request is asked, to the byte."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.requests.api_call import ApiCall, Cost, TextPrompt
from router.requests.json_members import with_members
from router.requests.parting import KEEP_KV, decode_call, params_of, parts, prefill_call

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["a", "b", "stream_options", "min_tokens", "kv", 'q"', "é"]) | st.text()


def call(body: bytes, **changes: Any) -> ApiCall:
    """A completion of this body."""
    values: dict[str, Any] = {
        "path": "/v1/completions",
        "endpoint": "/v1/completions",
        "body": body,
        "headers": (("Accept-Encoding", "gzip"), ("X-Other", "1")),
        "request_id": "r",
        "model": "m",
        "stream": True,
        "prompt": TextPrompt(texts=("a",)),
    }
    return ApiCall(**values | changes)


@pytest.mark.parametrize(
    ("sent", "rest", "put"),
    [
        (b'{"prompt": "a"}', b'"prompt": "a"}', {}),
        (b'{"prompt":"a","max_tokens":5}', b'"prompt":"a"}', {}),
        (
            b'{"max_completion_tokens": 9,\n "prompt": "a"}',
            b'\n "prompt": "a"}',
            {"max_completion_tokens": 1},
        ),
        (
            b'{"prompt": "a", "stream": true, "stream_options": {"x": "}"}, "min_tokens": 2}',
            b'"prompt": "a"}',
            {"stream": False},
        ),
    ],
)
def test_a_prefill_leg_asks_for_one_token(sent: bytes, rest: bytes, put: dict[str, Any]) -> None:
    """Not streamed, without what would then be refused, and to be kept for somebody."""
    asked = prefill_call(call(sent))
    assert asked.body.endswith(rest)
    expected = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": json.loads(KEEP_KV)} | put
    assert json.loads(asked.body) == expected
    assert (asked.stream, asked.headers) == (False, (("X-Other", "1"),))


def test_a_decode_leg_is_the_request_and_what_was_handed_over() -> None:
    """Both as they came; nothing handed over, nothing changed."""
    sent = call(b' {"prompt": "\\u00e9", "top_p": 1.0}\n')
    params = params_of(
        b'{"id": 1, "kv_transfer_params" :\t{"big": 18446744073709551617, "f": 1E2} }'
    )
    assert params == b'{"big": 18446744073709551617, "f": 1E2}'
    asked = decode_call(sent, params)
    assert (
        asked.body == b' {"kv_transfer_params": %b, "prompt": "\\u00e9", "top_p": 1.0}\n' % params
    )
    assert decode_call(sent, None) == sent


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"[]", b"{", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 7}', b"{}"),
        '{"kv_transfer_params": {}}'.encode("utf-16"),
    ],
)
def test_what_is_no_handover_is_none(answer: bytes) -> None:
    """Whatever an engine answers; a reader must not fail."""
    assert params_of(answer) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "/v1/responses"},
        {"cost": Cost.NONE},
        {"prompts_count": 2},
        {"choices_count": 2},
        {"reads_prefixes": False},
        {"output_tokens_max": 1},
        {"body": b'{"kv_transfer_params": {}}'},
        {"body": b'{"use_beam_search": true}'},
    ],
)
def test_what_one_engine_has_to_do_alone(changes: dict[str, Any]) -> None:
    """The rest can be parted, also where a text speaks of such fields."""
    assert not parts(call(**{"body": b"{}"} | changes))
    assert parts(call(json.dumps({"prompt": 'a "kv_transfer_params" b'}).encode()))


@given(fields=st.lists(st.tuples(KEYS, VALUES), max_size=6), spaced=st.booleans())
def test_all_other_members_stay(fields: list[tuple[str, Any]], *, spaced: bool) -> None:
    """Law: the object has the members put first, none of those to drop, and the others in order."""
    separators = (" , ", " : ") if spaced else (",", ":")
    members = [
        separators[1].join(json.dumps(part, separators=separators) for part in field)
        for field in fields
    ]
    body = ("{" + separators[0].join(members) + "}").encode()
    changed = with_members(body, {b"kv": b'{"x": 1}'}, (b"stream_options", b"min_tokens"))
    read = json.loads(changed, object_pairs_hook=list)
    dropped = {"kv", "stream_options", "min_tokens"}
    before = json.loads(body, object_pairs_hook=list)
    assert read == [("kv", [("x", 1)]), *((k, v) for k, v in before if k not in dropped)]
