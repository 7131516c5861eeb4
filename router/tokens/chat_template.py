"""Messages of a request -> what a chat template is given, as vLLM does it. Pure."""

import json
from typing import Any, Final

import jinja2
import jinja2.nodes

_TEXT_KEYS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
_MEDIA: Final = ("image", "audio", "video")


def iterates_parts(template: str) -> bool:
    """Whether a template loops over a message's content; vLLM then leaves parts as they are."""
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(
            template
        )
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: jinja2.nodes.Node) -> bool:
    if isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return False


def conversation(messages: list[dict[str, Any]], *, iterates_parts: bool) -> list[dict[str, Any]]:
    """Messages as vLLM hands them to a template.

    Text parts are joined by newlines, unless the template itself walks over parts; media parts stay
    as bare markers there, and arguments of tool calls become objects. What a tool says is always
    text.

    Raises:
        ValueError: arguments of a tool call are not JSON.
    """
    return [_message(message, iterates_parts) for message in messages]


def _message(message: dict[str, Any], iterates_parts: bool) -> dict[str, Any]:
    content = message.get("content")
    as_parts = iterates_parts and message["role"] != "tool"
    if isinstance(content, str):
        shown: Any = [{"type": "text", "text": content}] if as_parts else content
    elif as_parts:
        shown = [_part(part) for part in content or ()]
    else:
        texts = (_text(part) for part in content or ())
        shown = "\n".join(text for text in texts if text is not None)
    if shown is content and "tool_calls" not in message:
        return message
    out = message | {"content": shown}
    if message["role"] == "assistant" and message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return out


def _text(part: dict[str, Any]) -> str | None:
    key = _TEXT_KEYS.get(part["type"])
    return None if key is None else str(part.get(key, ""))


def _part(part: dict[str, Any]) -> dict[str, Any]:
    text = _text(part)
    if text is not None:
        return {"type": "text", "text": text}
    medium = next((name for name in _MEDIA if name in part["type"]), part["type"])
    return {"type": medium}


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments travel as JSON text and templates want the object."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return call | {"function": function | {"arguments": arguments}}
