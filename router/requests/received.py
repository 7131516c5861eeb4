"""A request as HTTP brought it, before its body is understood."""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from router import headers as names
from router.requests.api_call import ApiCall, Cost

_PRINTABLE: Final = re.compile(r"[\x21-\x7e]{1,128}")
_TURN: Final = re.compile(r"[0-9]{1,6}")
_SESSION: Final = re.compile(r"[\x20-\x7e]{1,256}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's request id when it is printable and at most 128 characters, else a new one."""
    given = headers.get(names.REQUEST_ID, "")
    return given if _PRINTABLE.fullmatch(given) else secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request with its whole body.

    Attributes:
        method: of HTTP.
        path: with its query string, as it was sent.
        body: as received.
        headers: the client's, case-insensitive.
        request_id: from `request_id`.
        endpoint: its row in the table of endpoints.
        cost: of that row.
    """

    path: str
    body: bytes
    headers: Mapping[str, str]
    request_id: str
    method: str = "POST"
    endpoint: str = ""
    cost: Cost = Cost.PREFILL

    def call(self, **fields: Any) -> ApiCall:
        """The call it means: these fields, and what every call takes from HTTP."""
        session, turn = self.headers.get(names.SESSION, ""), self.headers.get(names.TURN, "")
        given: dict[str, Any] = {
            "method": self.method,
            "path": self.path,
            "endpoint": self.endpoint,
            "cost": self.cost,
            "body": self.body,
            "headers": tuple(self.headers.items()),
            "request_id": self.request_id,
            "turn": int(turn) if _TURN.fullmatch(turn) else 0,
            "session_id": session if _SESSION.fullmatch(session) else None,
            "policy": self.headers.get(names.POLICY),
            "asked_instances": _listed(self.headers, names.ASKED_INSTANCES),
            "explain": self.headers.get(names.EXPLAIN, "").lower() in {"1", "true"},
        }
        return ApiCall(**given | fields)


def _listed(headers: Mapping[str, str], name: str) -> str | None:
    """A header that is a list; several lines of it are one list (RFC 9110, 5.3)."""
    if name not in headers:
        return None
    return ",".join(value for one, value in headers.items() if one.lower() == name)


Parse = Callable[[Received], ApiCall]
"""Checks a request and takes out what routing needs.

Raises:
    RequestInvalid: with the field's name and what is expected of it.
"""
