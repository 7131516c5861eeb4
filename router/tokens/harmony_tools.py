"""Function tools as gpt-oss is shown them: declarations in the manner of TypeScript. Pure.

What of JSON Schema is shown, and how, is found by asking vLLM's own renderer (oss-harmony), and
held against it by tests/golden/vllm_0_32_harmony.json; what is not known for sure is refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

INTEGER_MAX: Final = 1 << 63

NESTED_MAX: Final = 16
"""Schemas within each other: each of them copies, and most indent, all that is in it."""

_NAMES: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "array": "Array<any>",
}


class Unrenderable(ValueError):  # noqa: N818 - named as what it is
    """Nothing is known for sure about how this is shown; the message says what."""


def tools_section(tools: Sequence[Mapping[str, Any]]) -> str:
    """All tools of a request, as they stand in a developer's message.

    Raises:
        Unrenderable: a tool is no function, or its schema says what is not known here.
    """
    lines = ["# Tools\n", "## functions\n", "namespace functions {\n"]
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)} as function}:
                lines += [f"// {line}" for line in _lines(str(function.get("description") or ""))]
                parameters = function.get("parameters")
                takes = "" if parameters is None else f"_: {_shown(parameters, '', NESTED_MAX)}"
                lines.append(f"type {name} = ({takes}) => any;\n")
            case _:
                raise Unrenderable("a tool is no function")
    return "\n".join([*lines, "} // namespace functions"])


def _lines(text: str) -> list[str]:
    """Without the ends of lines, the last one of which makes no line of its own."""
    *ended, last = text.split("\n")
    return [line.removesuffix("\r") for line in ended] + ([last] if last else [])


def _shown(schema: Any, indent: str, deeper: int) -> str:
    """The type that a schema describes; there may be so many more within each other."""
    if not deeper:
        raise Unrenderable(f"more than {NESTED_MAX} schemas within each other")
    if not isinstance(schema, dict):
        return "any"
    if "oneOf" in schema:
        raise Unrenderable("a schema with `oneOf`")
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [one for one in kind if isinstance(one, str)]
        return " | ".join("number" if one == "integer" else one for one in named) or "any"
    match kind:
        case "object":
            return _object(schema, indent, deeper)
        case "array" if "items" in schema:
            return f"{_shown(schema['items'], indent, deeper - 1)}[]"
        case "string":
            texts = [one for one in _list(schema, "enum") if isinstance(one, str)]
            return " | ".join(f'"{text}"' for text in texts) or "string"
        case _:
            return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"


def _object(schema: dict[str, Any], indent: str, deeper: int) -> str:
    lines = [f"{indent}// {text}" for text in _text_of(schema, "description")]
    lines.append("{")
    required = frozenset(name for name in _list(schema, "required") if isinstance(name, str))
    properties = schema.get("properties")
    for name, value in properties.items() if isinstance(properties, dict) else ():
        inner = value if isinstance(value, dict) else {}
        lines += _comments(inner, indent)
        shown = _shown(value, indent + "    ", deeper - 1)
        if inner.get("nullable") is True and "null" not in shown:
            shown += " | null"
        mark = "" if name in required else "?"
        lines.append(f"{indent}{name}{mark}: {shown},{_default(inner)}")
    return "\n".join([*lines, indent + "}"])


def _comments(schema: dict[str, Any], indent: str) -> list[str]:
    """Above a property."""
    lines = []
    for title in _text_of(schema, "title"):
        lines += [f"{indent}// {title}", f"{indent}//"]
    lines += [f"{indent}// {text}" for text in _text_of(schema, "description")]
    if examples := _list(schema, "examples"):
        lines.append(f"{indent}// Examples:")
        lines += [f'{indent}// - "{one}"' for one in examples if isinstance(one, str)]
    return lines


def _default(schema: dict[str, Any]) -> str:
    """Behind a property."""
    if "default" not in schema:
        return ""
    default = schema["default"]
    if isinstance(default, str):
        is_choice = bool(_list(schema, "enum"))
        return f" // default: {default}" if is_choice else f' // default: "{default}"'
    _refuse_numbers(default)
    return f" // default: {json.dumps(default, ensure_ascii=False, separators=(',', ':'))}"


def _refuse_numbers(value: Any) -> None:
    """Those that are not written alike everywhere."""
    match value:
        case dict():
            for inner in value.values():
                _refuse_numbers(inner)
        case list():
            for inner in value:
                _refuse_numbers(inner)
        case bool() | None | str():
            pass
        case int() if abs(value) < INTEGER_MAX:
            pass
        case float() if "e" not in repr(value):
            pass
        case _:
            raise Unrenderable(f"the number {value!r} in a schema")


def _text_of(schema: dict[str, Any], name: str) -> tuple[str, ...]:
    value = schema.get(name)
    return (value,) if isinstance(value, str) else ()


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
