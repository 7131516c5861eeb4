"""Changes of a body that the operator asked for: on its bytes, all others stay as they came."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from router.requests.api_call import ApiCall
from router.requests.body_fields import json_object
from router.requests.form_request import form_fields

USAGE_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Streams whose usage comes only when it is asked for, in an event of its own."""

_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BLANK: Final = re.compile(rb"[ \t\r\n]*+")
_PLAIN: Final = re.compile(rb"[^,\]} \t\r\n]*+")
_NESTED: Final = re.compile(rb'[^"{}\[\]]*+(?:"(?:[^"\\]++|\\.)*+"|([{}\[\]]))', re.DOTALL)
"""What has to be looked at to find the end of a list or an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """What the operator lets be changed; by default nothing.

    Attributes:
        aliases: name that clients may ask for -> name that engines serve.
        inject_usage: ask for the usage of every stream, and keep it from clients who did not.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    inject_usage: bool = False

    def apply(self, call: ApiCall) -> ApiCall:
        """The call with its body changed where that is asked for."""
        served = self.aliases.get(call.model)
        if served is not None and call.model:  # without one there is no place to write it
            call = replace(call, model=served, body=renamed(call, served))
        if self.inject_usage and call.stream and call.endpoint in USAGE_PATHS:
            call = _with_usage(call)
        return call


def renamed(call: ApiCall, served: str) -> bytes:
    """The body with another model: as JSON where it is that, else as a form."""
    if call.body.lstrip()[:1] == b"{":
        return _with_values(call.body, b"model", json.dumps(served).encode())
    content_type = next(
        (value for name, value in call.headers if name.lower() == "content-type"), ""
    )
    fields = form_fields(call.body, content_type)
    spans = [span for name, span in fields if name == b"model"]
    return _replaced(call.body, spans, served.encode())


def _with_usage(call: ApiCall) -> ApiCall:
    """Asking for usage; unchanged where the client asks for it, or for what cannot be read."""
    options = json_object(call.body).get("stream_options")
    if options is None:
        asked = b'{"include_usage": true}'
    elif isinstance(options, dict) and not options.get("include_usage"):
        asked = json.dumps(options | {"include_usage": True}).encode()
    else:
        return call
    spans = list(_spans(call.body, b"stream_options"))
    if spans:
        body = _replaced(call.body, spans, asked)
    else:
        end = call.body.rstrip().rfind(b"}")
        body = call.body[:end] + b', "stream_options": ' + asked + call.body[end:]
    return replace(call, body=body, hides_usage=True)


def _with_values(body: bytes, key: bytes, value: bytes) -> bytes:
    return _replaced(body, list(_spans(body, key)), value)


def _replaced(body: bytes, spans: list[tuple[int, int]], value: bytes) -> bytes:
    pieces, at = [], 0
    for start, end in spans:
        pieces += [body[at:start], value]
        at = end
    return b"".join((*pieces, body[at:]))


def _spans(body: bytes, key: bytes) -> Iterator[tuple[int, int]]:
    """Where values of this key of the outermost object stand, blanks around them left out.

    The body has been read as JSON before. A repeated key is found each time: which one counts is
    the reader's business.
    """
    at = _skip(body, body.index(b"{") + 1)
    while (named := _STRING.match(body, at)) is not None:
        colon = body.index(b":", named.end())
        start = _skip(body, colon + 1)
        end = _value_end(body, start)
        if json.loads(named[0]).encode("utf-8", "surrogatepass") == key:
            yield start, end
        at = _skip(body, _skip(body, end) + 1)  # a comma, or the end of the object


def _skip(body: bytes, at: int) -> int:
    found = _BLANK.match(body, at)
    assert found is not None, "no blank at all matches"
    return found.end()


def _value_end(body: bytes, start: int) -> int:
    if body[start : start + 1] not in {b"{", b"["}:
        found = _STRING.match(body, start) or _PLAIN.match(body, start)
        assert found is not None, "the empty value matches"
        return found.end()
    depth = 0
    for found in _NESTED.finditer(body, start):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[1], 0)
        if depth == 0:
            return found.end()
    raise AssertionError("the body has been read as JSON")
