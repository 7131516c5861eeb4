"""Changes that the operator asked for: of a body on its bytes, all others stay as they came."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from router.requests.api_call import ApiCall
from router.requests.body_fields import json_object
from router.requests.category import with_category
from router.requests.form_request import form_fields
from router.requests.json_members import replaced, spans

USAGE_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Streams whose usage comes only when it is asked for, in an event of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriting:
    """What the operator lets be changed; by default nothing.

    Attributes:
        aliases: name that clients may ask for -> name that engines serve.
        inject_usage: ask for the usage of every stream, and keep it from clients who did not.
        tell_category: add a header of type and turn.
    """

    aliases: Mapping[str, str] = field(default_factory=dict)
    inject_usage: bool = False
    tell_category: bool = False

    def apply(self, call: ApiCall) -> ApiCall:
        """The call with what is asked for changed."""
        served = self.aliases.get(call.model)
        if served is not None and call.model:  # without one there is no place to write it
            body = call.body if call.upgrades else renamed(call, served)
            call = replace(call, model=served, body=body)
        if self.inject_usage and call.stream and call.endpoint in USAGE_PATHS:
            call = _with_usage(call)
        return with_category(call) if self.tell_category else call


def renamed(call: ApiCall, served: str) -> bytes:
    """The body with another model: as JSON where it is that, else as a form."""
    if call.body.lstrip()[:1] == b"{":
        return replaced(call.body, list(spans(call.body, b"model")), json.dumps(served).encode())
    content_type = next(
        (value for name, value in call.headers if name.lower() == "content-type"), ""
    )
    fields = form_fields(call.body, content_type)
    places = [span for name, span in fields if name == b"model"]
    return replaced(call.body, places, served.encode())


def _with_usage(call: ApiCall) -> ApiCall:
    """Asking for usage; unchanged where the client asks for it, or for what cannot be read."""
    options = json_object(call.body).get("stream_options")
    if options is None:
        asked = b'{"include_usage": true}'
    elif isinstance(options, dict) and not options.get("include_usage"):
        asked = json.dumps(options | {"include_usage": True}).encode()
    else:
        return call
    places = list(spans(call.body, b"stream_options"))
    if places:
        body = replaced(call.body, places, asked)
    else:
        end = call.body.rstrip().rfind(b"}")
        body = call.body[:end] + b', "stream_options": ' + asked + call.body[end:]
    return replace(call, body=body, hides_usage=True)
