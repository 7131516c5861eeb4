"""Conversations as vLLM 0.32 hands them to a chat template, whichever API they came by. Pure.

A template sees a role, the content, and of what else a message may hold only what vLLM passes on;
it may print tools and tool calls as JSON, so that the order of their keys counts too. How content
is shown (`tokens.chat_template`) depends on the template and is not decided here.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NotRequired

import xxhash
from pydantic import ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from router.requests.api_call import ChatPrompt, OpaquePrompt
from router.requests.body_fields import MESSAGES_MAX, branch, invalid
from router.requests.prompt_forms import utf8_bytes

BILLING_HEADER: Final = "x-anthropic-billing-header"
"""Begins a line of a system prompt that changes with each request; vLLM leaves it out."""

PARTS_MAX: Final = 16_384
"""Parts of content in one conversation; each is looked at several times."""

_TEXT_KEYS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}

_SPEAKERS: Final = frozenset({"system", "user", "assistant"})
_SAID: Final = frozenset({"role", "content"})
"""What most messages of these roles have, and nothing else."""


@with_config(ConfigDict(extra="allow", strict=True))
class Part(TypedDict):
    """A part of a message's content; which others it has depends on its type."""

    type: Annotated[str, Field(min_length=1)]
    text: NotRequired[str | None]


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    Discriminator(
        branch,
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of content parts",
    ),
]


@with_config(ConfigDict(extra="allow", strict=True))
class Message(TypedDict):
    """A message of a chat; anything else in it is looked at leniently."""

    role: Annotated[str, Field(min_length=1)]
    content: NotRequired[Content | None]
    tool_calls: NotRequired[Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None]


Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)]

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    *,
    opaque: bool = False,
    orders_calls: bool = True,
    name: str = "messages",
    **fields: Any,
) -> ChatPrompt | OpaquePrompt:
    """A conversation to be tokenized, or an opaque one where that cannot be done exactly.

    Args:
        messages: as in OpenAI's chat API.
        opaque: something else than its messages makes it so.
        orders_calls: whether the API puts the keys of tool calls into an order of its own.
        name: of the body's field, for messages.
        fields: further ones of `ChatPrompt`, tools as `function_tool` makes them.

    Raises:
        RequestInvalid: it has more parts than PARTS_MAX.
    """
    contents = [message.get("content") for message in messages]
    parts_count = sum(len(content) for content in contents if isinstance(content, list))
    if parts_count > PARTS_MAX:
        raise invalid(name, f"holds {parts_count} content parts; at most {PARTS_MAX}")
    shown = [template_message(message, orders_calls=orders_calls) for message in messages]
    if opaque or fields.get("chat_template") is not None or not all(map(_is_text, shown)):
        return opaque_conversation(shown, fields.get("tools"))
    return ChatPrompt(messages=shown, **fields)


def turns(messages: Sequence[Mapping[str, Any]]) -> int:
    """Answers that a conversation holds already."""
    return sum(message.get("role") == "assistant" for message in messages)


def history_share(messages: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of a conversation's characters up to the end of its last answer, 0..1.

    Tools and what a template adds are not counted; most of that stands before the messages, so it
    is rather less than the share of tokens. None where there is no answer yet, or no text.
    """
    lengths = [_characters(message) for message in messages]
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].get("role") == "assistant":
            total = sum(lengths)
            return sum(lengths[: place + 1]) / total if total else None
    return None


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _characters(message: Mapping[str, Any]) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str):
        length = len(content)
    else:
        texts = (part.get("text") for part in _list(content) if isinstance(part, Mapping))
        length = sum(len(text) for text in texts if isinstance(text, str))
    for call in _list(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        said = function.get("arguments") if isinstance(function, Mapping) else None
        length += len(said) if isinstance(said, str) else 0
    return length


def template_kwargs(given: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Names for a template: the request's, and how much it shall reason."""
    kwargs = dict(given or {})
    if effort is not None:
        if "enable_thinking" not in kwargs:
            kwargs["enable_thinking"] = effort != "none"
        if effort != "auto":
            kwargs["reasoning_effort"] = effort
    return kwargs


# -- messages -------------------------------------------------------------------------------------


def template_message(message: Mapping[str, Any], *, orders_calls: bool = True) -> dict[str, Any]:
    """What a template sees of a message; its content still as text, parts or None."""
    role, content = message["role"], message.get("content")
    if content is not None and role in _SPEAKERS and message.keys() == _SAID:
        return {"role": role, "content": _content(role, content)}
    shown: dict[str, Any] = {"role": role, "content": _content(role, content)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_tool_call(call, orders_calls) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            shown["reasoning"] = shown["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    if role == "developer":
        shown["tools"] = message.get("tools")
    return shown


def _content(role: str, content: Any) -> Any:
    if isinstance(content, str):
        if role == "system" and content.startswith(BILLING_HEADER):
            return content.partition("\n")[2] or None
        return content
    if content is None:
        return None
    parts = []
    for part in content:
        key = _TEXT_KEYS.get(part["type"])
        if key is None or "uuid" in part:
            parts.append(part)
            continue
        text = part.get(key)
        if role == "system" and isinstance(text, str) and text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2] or None
        if text is not None:
            parts.append({"type": "text", "text": str(text)})
    return parts


def _tool_call(call: Mapping[str, Any], orders: bool) -> dict[str, Any]:
    """Arguments travel as JSON text; a template wants the object, an empty one if they are none."""
    shown = _ordered(call, "id", "function", "type") if orders else dict(call)
    function = call.get("function")
    if isinstance(function, Mapping):
        inner = _ordered(function, "arguments", "name") if orders else dict(function)
        shown["function"] = inner | {"arguments": _arguments(function.get("arguments"))}
    return shown


def _arguments(given: Any) -> dict[str, Any]:
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):  # the latter of what is nested a thousand deep
            return {}
    return given if isinstance(given, dict) else {}


def _ordered(mapping: Mapping[str, Any], *first: str) -> dict[str, Any]:
    """The same with these keys first, in this order, where it has them."""
    head = {key: mapping[key] for key in first if key in mapping}
    return head | {key: value for key, value in mapping.items() if key not in head}


# -- tools ----------------------------------------------------------------------------------------


def function_tool(
    *, name: Any, description: Any = None, parameters: Any = None, **more: Any
) -> dict[str, Any]:
    """A tool as vLLM shows it to a template, whichever API declared it."""
    function = {"name": name, "description": description, "parameters": parameters}
    for key in ("strict", "defer_loading"):
        if more.get(key) is not None:
            function[key] = more[key]
    return {"type": "function", "function": function}


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools of OpenAI's chat API; what is no function is the engine's to refuse."""
    if not tools:
        return None
    shown = []
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or "name" not in function:
            shown.append(dict(tool))
            continue
        defer = tool.get("defer_loading")
        one = function_tool(**({"defer_loading": defer} | function))
        shown.append(one if defer is None else one | {"defer_loading": defer})
    return shown


# -- what cannot be tokenized here ----------------------------------------------------------------


def _is_text(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return not isinstance(content, list) or all(
        part["type"] == "text" and "uuid" not in part for part in content
    )


def opaque_conversation(messages: Sequence[Mapping[str, Any]], tools: Any) -> OpaquePrompt:
    """Texts, roles and identities of media in the order in which most templates show them."""
    pieces: list[str] = [json.dumps(tools)] if tools else []
    media_count = 0
    texts_bytes = sum(map(utf8_bytes, pieces))
    for message in messages:
        pieces.append(str(message["role"]))
        for part in _parts(message):
            if isinstance(part, str):
                pieces.append(part)
                texts_bytes += utf8_bytes(part)
            else:
                pieces.append(media_identity(part))
                media_count += 1
    return OpaquePrompt(pieces=tuple(pieces), media_count=media_count, texts_bytes=texts_bytes)


def _parts(message: Mapping[str, Any]) -> Iterator[str | Mapping[str, Any]]:
    if "reasoning" in message:
        yield str(message["reasoning"])
    content = message["content"]
    for part in content if isinstance(content, list) else [content or ""]:
        if isinstance(part, str):
            yield part
        else:
            yield part["text"] if part["type"] == "text" and "text" in part else part
    if "tool_calls" in message:
        yield _as_json(message["tool_calls"])


def _as_json(value: Any) -> str:
    """Empty for what is too deep to be written, though it could be read."""
    try:
        return json.dumps(value)
    except RecursionError:
        return ""


def media_identity(part: Mapping[str, Any]) -> str:
    """A short name of an image, a sound, a film: equal for equal ones."""
    digest = xxhash.xxh3_128()
    _update(digest, part)
    return f"{part['type']}:{digest.hexdigest()}"


def _update(digest: xxhash.xxh3_128, value: Any) -> None:
    """JSON is at most some hundred levels deep when it has been read."""
    match value:
        case dict():
            for key, inner in sorted(value.items()):
                digest.update(key.encode("utf-8", "surrogatepass"))
                _update(digest, inner)
        case list():
            for inner in value:
                _update(digest, inner)
        case str():
            digest.update(value.encode("utf-8", "surrogatepass"))
        case _:
            digest.update(repr(value).encode())
