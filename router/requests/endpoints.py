"""The table of endpoints: what is asked of engines, by path.

Behind each row stands what vLLM 0.32 does there: whether a prompt is prefilled, and whether its
token ids follow from the request and the model's tokenizer (exact) or the engine alone knows them
(`OpaquePrompt`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote

from router.errors import Forbidden, RequestInvalid
from router.requests.anthropic_request import parse_count_tokens, parse_messages
from router.requests.api_call import ApiCall, Cost
from router.requests.cohere_request import parse_cohere_chat
from router.requests.form_request import parse_form
from router.requests.openai_request import parse_by_content, parse_chat, parse_completion
from router.requests.other_request import parse_other
from router.requests.pooling_request import parse_embed, parse_pooling, parse_scoring
from router.requests.received import Parse, Received
from router.requests.responses_request import is_of_stored, parse_responses, parse_stored
from router.requests.tokens_request import parse_generate, parse_without_prompt
from router.requests.websocket_request import parse_websocket


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One row.

    Attributes:
        path: of HTTP; the last one stands for every other path under it.
        parse: reads its requests.
        methods: of HTTP, that it takes.
        cost: what a request costs its engine; a parser may find that it costs less.
    """

    path: str
    parse: Parse
    methods: tuple[str, ...] = ("POST",)
    cost: Cost = Cost.PREFILL


CHAT: Final = Endpoint(path="/v1/chat/completions", parse=parse_chat)
COMPLETIONS: Final = Endpoint(path="/v1/completions", parse=parse_completion)

OTHER: Final = Endpoint(
    path="/v1/",
    parse=parse_other,
    methods=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"),
)
"""Any other path under `/v1/`."""

STORED_RESPONSES: Final = Endpoint(
    path="/v1/responses/", parse=parse_stored, methods=OTHER.methods, cost=Cost.NONE
)
"""Answers that engines hold, by id: read, followed, cancelled."""

REALTIME: Final = Endpoint(path="/v1/realtime", parse=parse_websocket, methods=("GET",))
"""The WebSocket that vLLM 0.32 has: speech to text. Elsewhere the wish for one is not passed on: an
engine that did not heed it would answer a request whose model nobody has checked."""

ENGINE_ADMIN_PATHS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""What changes an engine for everybody. Passed on, it would change whichever one was chosen, and be
any client's to do; whoever operates the engines asks each one itself."""

ROUTE: Final = Endpoint(path="/route", parse=parse_by_content)
"""Asks where a chat or a completion would go."""

ENDPOINTS: Final[Mapping[str, Endpoint]] = MappingProxyType(
    {
        one.path: one
        for one in (
            CHAT,
            COMPLETIONS,
            Endpoint(path="/v1/responses", parse=parse_responses),
            Endpoint(path="/v1/messages", parse=parse_messages),
            Endpoint(path="/v1/messages/count_tokens", parse=parse_count_tokens, cost=Cost.NONE),
            Endpoint(path="/v1/embeddings", parse=parse_pooling),
            Endpoint(path="/v2/embed", parse=parse_embed),
            Endpoint(path="/pooling", parse=parse_pooling),
            Endpoint(path="/classify", parse=parse_pooling),
            Endpoint(path="/score", parse=parse_scoring),
            Endpoint(path="/v1/score", parse=parse_scoring),
            Endpoint(path="/rerank", parse=parse_scoring),
            Endpoint(path="/v1/rerank", parse=parse_scoring),
            Endpoint(path="/v2/rerank", parse=parse_scoring),
            Endpoint(path="/generative_scoring", parse=parse_scoring),
            Endpoint(path="/cohere/v2/chat", parse=parse_cohere_chat),
            Endpoint(path="/tokenize", parse=parse_without_prompt, cost=Cost.NONE),
            Endpoint(path="/detokenize", parse=parse_without_prompt, cost=Cost.NONE),
            Endpoint(path="/v1/audio/transcriptions", parse=parse_form),
            Endpoint(path="/v1/audio/translations", parse=parse_form),
            Endpoint(path="/inference/v1/generate", parse=parse_generate),
        )
    }
)
"""By path."""


def endpoint_of(method: str, path: str, *, upgrades: bool = False) -> Endpoint:
    """The row of a request.

    Args:
        method: of HTTP.
        path: decoded, without query string.
        upgrades: it asks to go on as a WebSocket.
    """
    known = ENDPOINTS.get(path)
    if known is None:
        if upgrades and method == "GET" and path == REALTIME.path:
            return REALTIME
        return STORED_RESPONSES if is_of_stored(method, path) else OTHER
    return known


def parse(
    endpoint: Endpoint,
    body: bytes,
    headers: Mapping[str, str],
    *,
    request_id: str,
    method: str = "POST",
    path: str | None = None,
) -> ApiCall:
    """Check a request and take out what routing needs.

    Args:
        endpoint: the row of its path.
        body: as received.
        headers: the client's, case-insensitive.
        request_id: from `received.request_id`.
        method: of HTTP.
        path: with its query string, as it was sent; None: the row's.

    Raises:
        RequestInvalid: with the field's name and what is expected of it.
        Forbidden: the path is for whoever operates the engine.
    """
    path = endpoint.path if path is None else path
    refuse_climbing(path)
    if endpoint in (OTHER, REALTIME):
        _refuse_engine_admin(path)
    encoding = headers.get("Content-Encoding", "identity")
    if endpoint not in (OTHER, REALTIME) and encoding.lower() != "identity":
        raise RequestInvalid(
            f"Content-Encoding: bodies of {endpoint.path} have to be read here, and vLLM does not "
            "take compressed ones; send the body as it is.",
            param="Content-Encoding",
        )
    return endpoint.parse(
        Received(
            method=method,
            path=path,
            body=body,
            headers=headers,
            request_id=request_id,
            endpoint=endpoint.path,
            cost=endpoint.cost,
        )
    )


def _refuse_engine_admin(path: str) -> None:
    """However the path is written; an engine may take doubled slashes for one."""
    plain = "/" + "/".join(filter(None, _decoded(path).split("/")))
    if plain.lower() in ENGINE_ADMIN_PATHS:
        raise Forbidden(f"{plain} changes one engine: ask that engine itself, not the router.")


def _decoded(path: str) -> str:
    return unquote(path.partition("?")[0])


def refuse_climbing(path: str) -> None:
    """Before a path under `/v1/` means one that is not.

    Raises:
        RequestInvalid: it has a segment `.` or `..`, however written.
    """
    segments = _decoded(path).replace("\\", "/").split("/")
    if "." in segments or ".." in segments:
        raise RequestInvalid("The path holds a segment `.` or `..`: leave it out.", param="path")
