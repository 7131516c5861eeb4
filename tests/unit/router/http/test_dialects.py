"""Errors are in the words of the API that was asked."""

import json

import pytest

from router.http.dialects import error_body, error_event


def test_openais_words() -> None:
    """Type by status, field and reason."""
    body = error_body("/v1/completions", 400, "no", "request-invalid", param="n")
    assert body == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "n",
            "code": "request-invalid",
        }
    }
    assert error_event("/v1/completions", 502, "no", "x").startswith(b'data: {"error": {')


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_words(path: str, status: int, kind: str) -> None:
    """Its shape, its types; in a stream an event by that name."""
    expected = {"type": "error", "error": {"type": kind, "message": "no"}}
    assert error_body(path, status, "no", "x", param="n") == expected
    name, data = error_event(path, status, "no", "x").removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == expected
