"""WebSockets: passed on to the engine, byte by byte, once it has agreed."""

from urllib.parse import parse_qs

from router.errors import RequestInvalid
from router.requests.api_call import ApiCall, OpaquePrompt
from router.requests.body_fields import MODEL_CHARACTERS_MAX, invalid
from router.requests.received import Received


def parse_websocket(received: Received) -> ApiCall:
    """A request to go on as a WebSocket; see `received.Parse`.

    Its model stands in the query, as OpenAI's clients write it, or the only one is meant. vLLM is
    told it again in the first message, which nobody reads here. What will be said is not known:
    the session counts as one request with a prompt of one token for as long as it lasts.
    """
    if received.body:
        raise RequestInvalid("A request to open a WebSocket has no body. Leave it out.")
    query = received.path.partition("?")[2]
    model = parse_qs(query).get("model", [""])[-1]
    if len(model) > MODEL_CHARACTERS_MAX:
        raise invalid("model", f"must have at most {MODEL_CHARACTERS_MAX} characters")
    return received.call(
        model=model,
        stream=True,
        prompt=OpaquePrompt(pieces=()),
        prompt_field="model",
        tells_cached_tokens=False,
        upgrades=True,
    )
