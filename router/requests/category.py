"""What kind of reuse a request stands for, told to engines that evict by it; pure."""

from dataclasses import replace
from typing import Final

from router import headers as names
from router.requests.api_call import ApiCall

KINDS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/inference/v1/generate": "generate",
}
"""Types of requests by endpoint: those that generate from a prompt."""

TURN_MAX: Final = 8
"""Later turns count as one: a category needs enough requests to learn from."""


def with_category(call: ApiCall) -> ApiCall:
    """The call with a header that tells type and turn, where it has them.

    A client that tells a category itself knows better, and what generates nothing has none.
    """
    kind = KINDS.get(call.endpoint)
    if kind is None or any(name.lower() == names.CATEGORY for name, _ in call.headers):
        return call
    told = (names.CATEGORY, f"{kind}:{min(call.turn, TURN_MAX)}")
    return replace(call, headers=(*call.headers, told))
