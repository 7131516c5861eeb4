"""Which requests name an answer that an engine holds, and which answers it may hold."""

import json
from typing import Any

import pytest

from router.requests.api_call import ApiCall, Cost
from router.requests.endpoints import OTHER, STORED_RESPONSES, endpoint_of, parse


def call(method: str, path: str, body: Any = None) -> ApiCall:
    """Parsed as the router does it."""
    endpoint = endpoint_of(method, path.partition("?")[0])
    raw = b"" if body is None else json.dumps(body).encode()
    return parse(endpoint, raw, {}, request_id="r", method=method, path=path)


@pytest.mark.parametrize(
    ("method", "path", "response_id", "stream"),
    [
        ("GET", "/v1/responses/resp_1", "resp_1", False),
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=3", "resp_1", True),
        ("GET", "/v1/responses/resp_1?stream=False", "resp_1", False),
        ("GET", "/v1/responses/an%20id", "an id", False),
        ("DELETE", "/v1/responses/resp_1", "resp_1", False),
        ("POST", "/v1/responses/resp_1/cancel", "resp_1", False),
        ("GET", "/v1/responses/resp_1/input_items", "resp_1", False),
    ],
)
def test_a_path_names_what_is_held(method: str, path: str, response_id: str, stream: bool) -> None:
    """By the id alone: no model, no prompt, nothing that counts; the path goes on as it was."""
    made = call(method, path, {} if method == "POST" else None)
    assert (made.endpoint, made.cost, made.model) == (STORED_RESPONSES.path, Cost.NONE, "")
    assert (made.names_response, made.stream, made.path) == (response_id, stream, path)
    assert not made.keeps_answer


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses/compact"),
        ("POST", "/v1/responses/input_tokens"),
        ("GET", "/v1/responses/a/b/c"),
        ("GET", "/v1/responses//a"),
        ("GET", "/v1/conversations/a"),
    ],
)
def test_other_paths_name_nothing(method: str, path: str) -> None:
    """What is posted beside the answers is a deed with a prompt of its own."""
    assert endpoint_of(method, path) is OTHER
    assert call(method, path, {"model": "m"}).names_response is None


@pytest.mark.parametrize(
    ("fields", "names", "keeps"),
    [
        ({}, None, True),
        ({"store": False}, None, False),
        ({"store": None}, None, False),
        ({"background": True, "stream": True}, None, True),
        ({"previous_response_id": "resp_1"}, "resp_1", True),
        ({"previous_response_id": "resp_1", "store": False}, "resp_1", False),
    ],
)
def test_a_turn_names_the_last_one_and_may_be_kept(
    fields: dict[str, Any], names: str | None, keeps: bool
) -> None:
    """A conversation that only the engine knows stands before the input: no prefix is looked up."""
    made = call("POST", "/v1/responses", {"model": "m", "input": "hi"} | fields)
    assert (made.names_response, made.keeps_answer) == (names, keeps)
    assert made.reads_prefixes is (names is None)
