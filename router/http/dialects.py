"""Errors in the words of the API that was asked: OpenAI's, or Anthropic's under its paths. Pure."""

import json
from typing import Any, Final

ANTHROPIC_PATH: Final = "/v1/messages"

SERVER_ERROR_MIN: Final = 500

_NAMES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_NAMES: Final = _NAMES | {413: "request_too_large", 503: "overloaded_error"}


def error_body(
    path: str, status: int, message: str, code: str, *, param: str | None = None
) -> dict[str, Any]:
    """The body of an answer that is an error.

    Args:
        path: that was asked.
        status: of HTTP.
        message: for whoever reads it.
        code: the reason, as in the header.
        param: the field of the request that is wrong.
    """
    if is_anthropic(path):
        return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}
    error = {"message": message, "type": openai_type(status), "param": param, "code": code}
    return {"error": error}


def error_event(path: str, status: int, message: str, code: str) -> bytes:
    """The last event of a stream that cannot go on."""
    name = b"event: error\n" if is_anthropic(path) else b""
    data = json.dumps(error_body(path, status, message, code)).encode()
    return name + b"data: " + data + b"\n\n"


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def openai_type(status: int) -> str:
    """OpenAI's name for a class of errors."""
    rest = "invalid_request_error" if status < SERVER_ERROR_MIN else "server_error"
    return _NAMES.get(status, rest)


def anthropic_type(status: int) -> str:
    """Anthropic's name for a class of errors."""
    rest = "invalid_request_error" if status < SERVER_ERROR_MIN else "api_error"
    return _ANTHROPIC_NAMES.get(status, rest)
