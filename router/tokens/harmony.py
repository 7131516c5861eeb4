"""Conversations as vLLM 0.32 renders them for gpt-oss: in harmony's format, by no template. Pure.

What is rendered is what the client said, not what templates are given: arguments of calls stay the
text they were. Reasoning goes once an answer stands behind it. Held against vLLM's own code by
tests/golden/vllm_0_32_harmony.json.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.tokens.harmony_tools import Unrenderable, tools_section

MARKS: Final = frozenset(
    {"<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>"}
)
"""Special tokens by which a tokenizer is known to be of this format."""

MARK: Final = "<|"
"""Begins every special token; in what somebody says it would be taken for one here, not there."""

EFFORTS: Final = frozenset({"low", "medium", "high"})

_SYSTEM: Final = (
    "You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {date}\n\nReasoning: {effort}\n\n"
    "# Valid channels: analysis, commentary, final. "
    "Channel must be included for every message."
)
_CALLS: Final = "\nCalls to these tools must go to the commentary channel: 'functions'."
_ANSWER: Final = "<|start|>assistant"
_ANALYSIS: Final = "<|channel|>analysis"
_COMMENTARY: Final = "<|channel|>commentary"
_FINAL: Final = "<|channel|>final"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One message of the format: what stands before its text, the text in parts, and its end."""

    head: str
    said: tuple[str, ...]
    end: str = "<|end|>"


def is_harmony(special_tokens: Iterable[str]) -> bool:
    """Whether a tokenizer with these special tokens is gpt-oss's."""
    return MARKS.issubset(special_tokens)


def rendered(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    effort: str | None,
    date: str,
) -> tuple[str, ...]:
    """Texts whose token ids, one after the other, are those of the prompt.

    Args:
        messages: as the client sent them.
        tools: as in OpenAI's chat API.
        effort: how much to reason; None for the engine's default.
        date: the engine's, like 2026-11-30.

    Raises:
        Unrenderable: the engine refuses it, or it is not known for sure what it makes of it.
    """
    if not messages:
        raise Unrenderable("nothing is known of what the engine is given")
    if effort is not None and effort not in EFFORTS:
        raise Unrenderable(f"reasoning effort `{effort}`")
    instructions, rest = _instructions(messages)
    system = _SYSTEM.format(date=date, effort=effort or "medium") + (_CALLS if tools else "")
    shown = [_Message(head="<|start|>system", said=(system,))]
    if instructions or tools:
        sections = [] if instructions is None else [f"# Instructions\n\n{instructions}"]
        sections += [tools_section(tools)] if tools else []
        shown.append(_developer("\n\n".join(sections)))
    names = _call_names(rest)
    for message in rest:
        shown += _messages(message, names)
    return _segments(_without_old_analysis(shown))


def _developer(text: str) -> _Message:
    return _Message(head="<|start|>developer", said=(text,))


def _assistant(channel: str, *said: str) -> _Message:
    return _Message(head=_ANSWER + channel, said=said)


def _instructions(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[str | None, Sequence[Mapping[str, Any]]]:
    """What a first message says to the system, and the others."""
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return None, messages
    return _flat(messages[0].get("content")), messages[1:]


def _flat(content: Any) -> str | None:
    """All text of a message; None where there is none."""
    if content is None or isinstance(content, str):
        return content
    texts = [part["text"] for part in _parts(content) if part.get("text") is not None]
    return "".join(map(_text, texts)) if texts else None


def _parts(content: Any) -> list[Mapping[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise Unrenderable("content that is neither text nor parts")
    return content


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unrenderable("something else where a text should be")
    return value


def _call_names(messages: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return {call.get("id"): (call.get("function") or {}).get("name") for call in calls}


def _messages(message: Mapping[str, Any], names: Mapping[Any, Any]) -> list[_Message]:
    """What one message of a chat becomes."""
    role, content = message.get("role"), message.get("content")
    match role:
        case "assistant":
            return _of_assistant(message)
        case "tool":
            name = _text(names.get(message.get("tool_call_id"), ""))
            head = f"<|start|>functions.{name}{_COMMENTARY} to=assistant"
            return [_Message(head=head, said=(_flat(content) or "",))]
        case "system" | "developer":
            text = _flat(content)
            return [] if text is None else [_developer(f"# Instructions\n\n{text}")]
        case "user":
            return [_Message(head="<|start|>user", said=_said(content))]
        case _:
            raise Unrenderable(f"the role `{role}`")


def _of_assistant(message: Mapping[str, Any]) -> list[_Message]:
    content = message.get("content")
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    analysis = [_assistant(_ANALYSIS, _text(reasoning))] if reasoning else []
    calls = message.get("tool_calls")
    if not calls:
        said = _said(content)
        return analysis + ([_assistant(_FINAL, *said)] if said and said[0] else [])
    preamble = _flat(content)
    shown = [_assistant(_COMMENTARY, preamble)] if preamble else []
    return [*shown, *analysis, *map(_call, calls)]


def _call(call: Mapping[str, Any]) -> _Message:
    function = call.get("function") or {}
    name, arguments = _text(function.get("name")), function.get("arguments")
    # Text in OpenAI's APIs, an object in Anthropic's, of which vLLM makes a text.
    arguments = json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments or "")
    head = f"{_ANSWER} to=functions.{name}{_COMMENTARY} json"
    return _Message(head=head, said=(arguments,), end="<|call|>")


def _said(content: Any) -> tuple[str, ...]:
    """A text for each part."""
    if not content:
        return ("",)
    if isinstance(content, str):
        return (content,)
    return tuple(_text(part.get("text", "")) for part in _parts(content))


def _without_old_analysis(messages: list[_Message]) -> list[_Message]:
    """Reasoning in front of the last answer goes."""
    answers = [at for at, one in enumerate(messages) if one.head == _ANSWER + _FINAL]
    last = answers[-1] if answers else 0
    old = _ANSWER + _ANALYSIS
    return [one for at, one in enumerate(messages) if at >= last or one.head != old]


def _segments(messages: Sequence[_Message]) -> tuple[str, ...]:
    """Parts of a message are tokenized each by itself, so a text ends between two of them."""
    segments, open_text = [], ""
    for message in messages:
        names = message.head.partition("<|channel|>")[0].removeprefix("<|start|>")
        if MARK in names or any(MARK in text for text in message.said):
            raise Unrenderable("a text with a special token in it")
        open_text += message.head + "<|message|>"
        for text in message.said[:-1]:
            segments.append(open_text + text)
            open_text = ""
        open_text += "".join(message.said[-1:]) + message.end
    return (*segments, open_text + _ANSWER)
