"""OpenAI's responses: input items -> the chat messages that vLLM 0.32 makes of them.

An answer, its reasoning and its tool calls are items of their own, and one message of the chat.
An engine may keep an answer, and a later request names it: to go on from it, to read or cancel it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, unquote

from pydantic import Field

from router.requests.api_call import ApiCall, Cost, OpaquePrompt
from router.requests.body_fields import MESSAGES_MAX, Body, checked, invalid, json_object, kind
from router.requests.chat_messages import (
    Objects,
    chat_prompt,
    function_tool,
    history_share,
    template_kwargs,
    turns,
)
from router.requests.received import Received
from router.requests.responses_as_chat import as_chat

_STORED: Final = re.compile(r"/v1/responses/([^/]+)(/[^/]+)?")
"""A stored answer, or something of it; what is posted to the former names a deed, not an answer."""

_UNFINISHED: Final = ("in_progress", "incomplete")

_TRUE: Final = frozenset({"true", "1", "on", "t", "y", "yes"})
"""What vLLM's framework takes for true."""

_CUSTOM_TOOL_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
"""What vLLM shows of a tool that takes plain text."""


class _Reasoning(Body):
    effort: str | None = None


class _ResponsesBody(Body):
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=0)] | None = None
    previous_response_id: str | None = None
    reasoning: _Reasoning | None = None
    store: Any = True
    tools: Objects = Field(default_factory=list)
    truncation: str | None = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None
    enable_response_messages: Any = None


class _Unreadable(Exception):  # noqa: N818 - a condition, and never leaves this module
    """An item that makes no message, or one that only the engine can make."""


def parse_responses(received: Received) -> ApiCall:
    """`/v1/responses`; see `received.Parse`."""
    fields = json_object(received.body)
    body = checked(_ResponsesBody, fields)
    items = _items(fields.get("input"))
    opaque = body.previous_response_id is not None
    try:
        messages = _messages(items)
    except _Unreadable:
        opaque, messages = True, [{"role": "user", "content": json.dumps(items)}]
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    continues = not isinstance(items, str) and _continues(items)
    return received.call(
        model=body.model or "",
        stream=bool(body.stream),
        prompt=chat_prompt(
            messages,
            opaque=opaque or body.truncates_end,
            orders_calls=False,
            name="input",
            said=as_chat(items, instructions=body.instructions, tools=body.tools),
            effort=body.reasoning.effort if body.reasoning else None,
            tools=_tools(body.tools),
            template_kwargs=template_kwargs(
                body.chat_template_kwargs, body.reasoning.effort if body.reasoning else None
            ),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        ),
        prompt_field="input",
        # The messages, of the client's own making, would stand behind the usage.
        tells_cached_tokens=not body.enable_response_messages,
        turn=turns(messages),
        history_share=history_share(messages),
        # Of what stands before the input only the engine knows how long it is, and what it says.
        reads_prefixes=body.previous_response_id is None,
        names_response=body.previous_response_id,
        keeps_answer=bool(body.store),
        cache_salt=body.cache_salt,
        output_tokens_max=body.max_output_tokens,
        truncate_prompt_tokens=None if body.truncation == "disabled" else -1,
    )


def is_of_stored(method: str, path: str) -> bool:
    """Whether a request reads, cancels or deletes an answer that an engine holds.

    Args:
        method: of HTTP.
        path: decoded, without query string.
    """
    found = _STORED.fullmatch(path)
    return found is not None and (method != "POST" or found[2] is not None)


def parse_stored(received: Received) -> ApiCall:
    """What lies under `/v1/responses/ID`; see `received.Parse`. It names no model."""
    path, _, query = received.path.partition("?")
    found = _STORED.fullmatch(unquote(path))
    return received.call(
        cost=Cost.NONE,
        model="",
        stream=parse_qs(query).get("stream", [""])[-1].lower() in _TRUE,
        prompt=OpaquePrompt(pieces=()),
        names_response=None if found is None else found[1],
    )


def _items(value: object) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        missing = "is required" if value is None else f"got {kind(value)}"
        raise invalid("input", f"{missing}; send a string or a list of items")
    if len(value) > MESSAGES_MAX:
        raise invalid("input", f"holds {len(value)} items; at most {MESSAGES_MAX}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise invalid(f"input[{index}]", f"must be an object (got {kind(item)})")
    return value


def _continues(items: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last item is a part of an answer that shall go on."""
    if not items or items[-1].get("type", "message") not in ("message", "reasoning"):
        return False
    return items[-1].get("status") in _UNFINISHED


# -- items ----------------------------------------------------------------------------------------


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    kind_of, role = item.get("type"), item.get("role")
    if kind_of in ("function_call", "custom_tool_call"):
        call = {"id": _text(item, "call_id"), "function": _function(item), "type": "function"}
        answer = _answer_before(messages)
        if answer is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            answer.setdefault("tool_calls", []).append(call)
    elif kind_of in ("function_call_output", "custom_tool_call_output"):
        messages.append(
            {"role": "tool", "content": _content(item, "output"), "tool_call_id": item["call_id"]}
            if isinstance(item.get("call_id"), str)
            else _unreadable()
        )
    elif kind_of == "reasoning":
        _join(messages, "reasoning", _reasoning(item))
    elif kind_of not in (None, "message") or not isinstance(role, str):
        _unreadable()
    elif role == "assistant":
        _join(messages, "content", _said(item))
    else:
        messages.append({"role": role, "content": _content(item, "content")})


def _unreadable() -> dict[str, Any]:
    raise _Unreadable


def _answer_before(messages: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _join(messages: list[dict[str, Any]], key: str, text: str) -> None:
    """Into the answer before it, if that has none yet; else an answer of its own."""
    answer = _answer_before(messages)
    if answer is None or answer.get(key) is not None:
        messages.append({"role": "assistant", key: text})
    else:
        answer[key] = text


def _function(item: Mapping[str, Any]) -> dict[str, Any]:
    name = _text(item, "name")
    if item["type"] == "custom_tool_call":
        return {"name": name, "arguments": json.dumps({"input": item.get("input") or ""})}
    if isinstance(item.get("namespace"), str) and item["namespace"]:
        name = f"{item['namespace']}__{name}"
    return {"name": name, "arguments": _text(item, "arguments")}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise _Unreadable
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            return _text(parts[0], "text")
    return ""


def _said(item: Mapping[str, Any]) -> str:
    """Of an answer in parts only the first one is read."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _Unreadable
    return _text(content[0], "text")


def _content(item: Mapping[str, Any], key: str) -> str | list[dict[str, Any]]:
    content = item.get(key)
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in content
    ):
        raise _Unreadable
    return content


def _text(holder: object, key: str) -> str:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(value, str):
        raise _Unreadable
    return value


# -- tools ----------------------------------------------------------------------------------------


def _tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Functions, plain or in a namespace, and tools that take text; others no template sees."""
    if not tools:
        return None
    shown = []
    for tool in tools:
        match tool:
            case {"type": "function", "name": str()}:
                shown.append(function_tool(**tool))
            case {"type": "custom", "name": str(name)}:
                shown.append(
                    function_tool(
                        name=name,
                        description=tool.get("description"),
                        parameters=_CUSTOM_TOOL_PARAMETERS,
                    )
                )
            case {"type": "namespace", "name": str(namespace), "tools": list(inner)}:
                shown += [
                    function_tool(**one | {"name": f"{namespace}__{one['name']}"})
                    for one in inner
                    if isinstance(one, dict)
                    and one.get("type") == "function"
                    and isinstance(one.get("name"), str)
                ]
            case _:
                pass
    return shown
