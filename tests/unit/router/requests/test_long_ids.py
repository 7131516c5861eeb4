"""Long lists of token ids are read like short ones, without a long hold of the interpreter."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.contract.block_hash import pack_tokens
from router.errors import RequestInvalid
from router.requests.api_call import TokenPrompt
from router.requests.body_fields import json_object
from router.requests.endpoints import COMPLETIONS, ENDPOINTS, parse
from router.requests.long_ids import LONG_BYTES, LongIds

IDS = list(range(100_000, 120_000))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": IDS}),
        ("/v1/embeddings", {"input": IDS}),
        ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {}}),
    ],
)
@pytest.mark.parametrize("indent", [None, 0])
def test_a_long_list_is_what_a_short_one_is(
    path: str, fields: dict[str, Any], indent: int | None
) -> None:
    """However it is written; the body itself stays as it came."""
    body = json.dumps({"model": "m", **fields, "user": "u"}, indent=indent).encode()
    assert isinstance(json_object(body).get(next(iter(fields))), LongIds)
    call = parse(ENDPOINTS[path], body, {}, request_id="r")
    assert call.prompt == TokenPrompt(packed=(pack_tokens(IDS),))
    assert call.body == body


@settings(max_examples=20)
@given(
    numbers=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=40),
    gap=st.sampled_from([",", ", ", " ,\n"]),
)
def test_every_id_comes_through(numbers: list[int], gap: str) -> None:
    """Wherever a piece begins."""
    many = numbers * (LONG_BYTES // len(numbers))
    body = ('{"model":"m","prompt":[' + gap.join(map(str, many)) + "]}").encode()
    prompt = parse(COMPLETIONS, body, {}, request_id="r").prompt
    assert prompt == TokenPrompt(packed=(pack_tokens(many),))


LIST = ",".join(map(str, IDS))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (LIST + ",,1", "token ids"),
        (LIST + ",4294967296", "token ids"),
        (LIST + ",1 2", "token ids"),
        (LIST + ",", "token ids"),
        (LIST + ",-1", "token ids"),
        (LIST + ",true", "token ids"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(written: str, words: str) -> None:
    """As of a short one."""
    body = ('{"model":"m","prompt":[' + written + "]}").encode()
    with pytest.raises(RequestInvalid, match=words) as caught:
        parse(COMPLETIONS, body, {}, request_id="r")
    assert caught.value.param in {"prompt", None}


def test_a_list_inside_a_text_is_text() -> None:
    """Quotes in a text are escaped, so it is never taken for a field."""
    text = f'{{"prompt":[{LIST}]}}'
    fields = json_object(json.dumps({"model": "m", "prompt": text, "x": {"input": IDS}}).encode())
    assert fields["prompt"] == text
