"""Paths that this router knows nothing about: passed on to the model they name."""

from typing import Any, Final

from pydantic_core import from_json

from router.errors import RequestInvalid
from router.requests.api_call import ApiCall, Cost, OpaquePrompt
from router.requests.body_fields import MODEL_CHARACTERS_MAX, invalid, is_scattered, kind
from router.requests.received import Received

_WRITES: Final = ("POST", "PUT", "PATCH")


def parse_other(received: Received) -> ApiCall:
    """Any other path under `/v1/`; see `received.Parse`.

    A body need not be JSON, and where it names no model the only one is meant. What is posted may
    be a prompt: counted as one of the body's length.
    """
    fields = _fields(received)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", f"must be a string (got {kind(model)})")
    if model is not None and len(model) > MODEL_CHARACTERS_MAX:
        raise invalid("model", f"must have at most {MODEL_CHARACTERS_MAX} characters")
    writes = received.method in _WRITES and bool(received.body)
    return received.call(
        cost=Cost.PREFILL if writes else Cost.NONE,
        model=model or "",
        stream=fields.get("stream") is True,
        prompt=OpaquePrompt(pieces=(), texts_bytes=len(received.body)),
    )


def _fields(received: Received) -> dict[str, Any]:
    if received.headers.get("Content-Encoding", "identity").lower() != "identity":
        return {}
    if received.body.lstrip()[:1] != b"{":
        return {}
    if is_scattered(received.body):
        raise RequestInvalid("The request body has too many lists, objects and fields. Send fewer.")
    try:
        fields = from_json(received.body, allow_inf_nan=False)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
