"""Anthropic's messages -> the chat that vLLM 0.32 makes of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, with_config
from typing_extensions import TypedDict

from router.requests.api_call import ApiCall, OpaquePrompt
from router.requests.body_fields import (
    MESSAGES_MAX,
    Body,
    ModelName,
    branch,
    checked,
    json_object,
)
from router.requests.chat_messages import (
    BILLING_HEADER,
    Objects,
    Part,
    chat_prompt,
    function_tool,
    history_share,
    template_kwargs,
    turns,
)
from router.requests.received import Received

_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    Discriminator(
        branch,
        custom_error_type="content_type",
        custom_error_message="must be a string or a list of content blocks",
    ),
]


@with_config(ConfigDict(extra="allow", strict=True))
class _Message(TypedDict):
    role: Literal["user", "assistant", "system"]
    content: _Content


class _Thinking(Body):
    type: str | None = None


class _OutputConfig(Body):
    effort: str | None = None


class _MessagesBody(Body):
    model: ModelName
    messages: Annotated[
        list[_Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ]
    max_tokens: Annotated[int, Field(ge=1)]
    system: _Content | None = None
    tools: Objects | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: Any = None

    def effort(self) -> str | None:
        """How much a template is told to reason."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        return self.output_config.effort if self.output_config is not None else None


class _CountBody(Body):
    model: ModelName


def parse_messages(received: Received) -> ApiCall:
    """`/v1/messages`; see `received.Parse`."""
    body = checked(_MessagesBody, json_object(received.body))
    system = "".join(_system_texts(body.system))
    messages = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += _converted(message)
    return received.call(
        model=body.model,
        stream=bool(body.stream),
        prompt=chat_prompt(
            messages,
            opaque=_depends_on_more(body),
            merges_system=True,
            said=messages,
            effort=body.effort(),
            tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
            template_kwargs=template_kwargs(body.chat_template_kwargs, body.effort()),
        ),
        prompt_field="messages",
        turn=turns(messages),
        history_share=history_share(messages),
        cache_salt=body.cache_salt,
        output_tokens_max=body.max_tokens,
    )


def parse_count_tokens(received: Received) -> ApiCall:
    """`/v1/messages/count_tokens`; see `received.Parse`."""
    body = checked(_CountBody, json_object(received.body))
    return received.call(
        model=body.model, stream=False, prompt=OpaquePrompt(pieces=()), prompt_field="messages"
    )


def _depends_on_more(body: _MessagesBody) -> bool:
    """Whether the prompt depends on more than the request and what a template makes of it.

    A tool that comes or goes within the conversation, and a call without a name of its own, are
    rare.
    """
    params = body.kv_transfer_params
    if isinstance(params, dict) and params.get("prompt_token_ids") is not None:
        return True
    return any(
        block["type"] in ("tool_addition", "tool_removal")
        or (block["type"] == "tool_use" and not block.get("id"))
        for message in body.messages
        for block in _blocks(message["content"])
    )


# -- messages -------------------------------------------------------------------------------------


def _blocks(content: Any) -> Sequence[Mapping[str, Any]]:
    return [] if isinstance(content, str) else content


def _system_texts(content: Any) -> Iterator[str]:
    """A text as it is; of blocks those with text, without the one that changes with each request.

    A text on its own loses that line later, as in any chat.
    """
    if isinstance(content, str):
        yield content
        return
    for block in content or ():
        text = block.get("text")
        if block["type"] == "text" and text and not text.startswith(BILLING_HEADER):
            yield text


def _converted(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before the rest."""
    role, content = message["role"], message["content"]
    if role == "system":
        return _inline_system(content)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results = [block for block in content if role == "user" and block["type"] == "tool_result"]
    before = [one for block in results for one in _results(block)]
    parts = [part for block in content for part in _part(role, block)]
    calls = [_call(block) for block in content if block["type"] == "tool_use"]
    thoughts = [
        str(block["thinking"])
        for block in content
        if block["type"] == "thinking" and block.get("thinking") is not None
    ]
    shown: dict[str, Any] = {"role": role}
    if thoughts:
        shown["reasoning"] = "".join(thoughts)
    if calls:
        shown["tool_calls"] = calls
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        shown["content"] = parts[0]["text"] if is_text else parts
    return before if role == "user" and not parts else [*before, shown]


def _inline_system(content: Any) -> list[dict[str, Any]]:
    """What is said to the system between other messages, if it is said."""
    if isinstance(content, str) and content.startswith(BILLING_HEADER):
        return []
    text = "".join(_system_texts(content))
    return [{"role": "system", "content": text}] if text else []


def _part(role: str, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What of a block is content."""
    match block["type"]:
        case "text" if block.get("text"):
            yield {"type": "text", "text": block["text"]}
        case "image" if block.get("source"):
            yield _image(block["source"])
        case "tool_result" if role != "user":
            said = str(block["content"]) if block.get("content") else ""
            yield {"type": "text", "text": f"Tool result: {said}"}
        case _:
            pass


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    return {
        "id": block.get("id") or "",
        "type": "function",
        "function": {
            "name": block.get("name") or "",
            "arguments": arguments if isinstance(arguments, dict) else {},
        },
    }


def _image(source: Any) -> dict[str, Any]:
    """Only who it is matters here."""
    return {"type": "image_url", "image_url": source}


def _results(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    result: dict[str, Any] = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    content = block.get("content")
    if not isinstance(content, list):
        return [result | {"content": content if isinstance(content, str) else ""}]
    items = [item for item in content if isinstance(item, dict)]
    texts = [str(item.get("text", "")) for item in items if item.get("type") == "text"]
    shown = [result | {"content": "\n".join(texts)}]
    if images := [_image(item.get("source")) for item in items if item.get("type") == "image"]:
        shown.append({"role": "user", "content": images})
    names = [item.get("tool_name") or item.get("name") for item in items if _is_reference(item)]
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        shown.append(result | {"content": references})
    return shown


def _is_reference(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "tool_reference"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if isinstance(schema, dict) and "type" not in schema:
        schema = schema | {"type": "object"}
    return function_tool(
        name=tool.get("name"),
        description=tool.get("description"),
        parameters=schema,
        strict=tool.get("strict"),
        defer_loading=tool.get("defer_loading"),
    )
