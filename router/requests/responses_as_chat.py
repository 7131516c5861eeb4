"""OpenAI's responses as vLLM 0.32 takes them for gpt-oss: each item a message of its own. Pure.

There no template sees them, and they become other messages than for the rest of the models:
`responses_request` makes one message of an answer, its reasoning and its calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

UNKNOWN: Final[tuple[Mapping[str, Any], ...]] = ()
"""Something that the engine refuses, or of which it is not known what it makes of it."""


def as_chat(
    items: str | Sequence[Mapping[str, Any]],
    *,
    instructions: str | None,
    tools: Sequence[Mapping[str, Any]],
) -> Sequence[Mapping[str, Any]]:
    """A chat that becomes the same prompt; UNKNOWN where there is none.

    Args:
        items: the request's input.
        instructions: of the request.
        tools: likewise.
    """
    if any(tool.get("type") != "function" for tool in tools):
        return UNKNOWN
    messages: list[Mapping[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    called: set[object] = set()
    for item in items:
        message = _message(item, called, first=not messages)
        if message is None:
            return UNKNOWN
        if message:
            messages.append(message)
    return messages


def _message(
    item: Mapping[str, Any], called: set[object], *, first: bool
) -> Mapping[str, Any] | None:
    """Empty for an item that says nothing; None where it is not known."""
    match item:
        case {"type": "function_call", "call_id": str(call), "name": str(name)} if (
            isinstance(item.get("arguments"), str) and "namespace" not in item
        ):
            called.add(call)
            function = {"name": name, "arguments": item["arguments"]}
            return {"role": "assistant", "tool_calls": [{"id": call, "function": function}]}
        case {"type": "function_call_output", "call_id": str(call), "output": str(output)}:
            answered = {"role": "tool", "tool_call_id": call, "content": output}
            return answered if call in called else None
        case {"type": "reasoning"}:
            return _reasoning(item)
        case {"role": str(role), **rest} if rest.get("type", "message") == "message":
            return _said(role, item.get("content"), first=first)
        case _:
            return None


def _reasoning(item: Mapping[str, Any]) -> Mapping[str, Any] | None:
    content = item.get("content")
    if not content:
        return {}
    if not isinstance(content, list):
        return None
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        return None
    thought = "\n".join(map(str, texts))
    return {"role": "assistant", "reasoning": thought} if thought else None


def _said(role: str, content: Any, *, first: bool) -> Mapping[str, Any] | None:
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        texts = [str(part.get("text") or "") for part in content]
    else:
        return None
    if role in ("system", "developer"):
        return {"role": role, "content": content} if first or any(texts) else {}
    if role == "assistant" and not (texts and texts[0]):  # an answer that no chat can hold
        return None
    return {"role": role, "content": content}
