"""Embeddings, pooling, classification, scores: prompts that nothing is generated from.

vLLM 0.32 caches prefixes of pooling models too, where their attention allows it; what each token
is pooled into (`token_embed`, `token_classify`) is computed anew every time.
"""

from typing import Any, Final

from router.requests.api_call import ApiCall, OpaquePrompt, Prompt
from router.requests.body_fields import Body, checked, invalid, json_object
from router.requests.chat_messages import Messages, chat_prompt
from router.requests.prompt_forms import count, opaque, prompt_of, unless_cut
from router.requests.received import Received

_BY_TOKEN: Final = ("token_embed", "token_classify")

_PAIRS: Final = (
    ("query", "documents"),
    ("query", "items"),
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
"""Names under which two sides to be compared come."""

SIDES_MAX: Final = 16_384
"""Texts on one side; each pair is a prompt."""


class _PoolingBody(Body):
    task: Any = None
    padding: Any = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False


class _Conversation(Body):
    messages: Messages


def parse_pooling(received: Received) -> ApiCall:
    """`/v1/embeddings`, `/pooling`, `/classify`; see `received.Parse`."""
    fields = json_object(received.body)
    body = checked(_PoolingBody, fields)
    name, prompt = _prompt(fields, body)
    return received.call(
        model=body.model or "",
        stream=False,
        prompt=prompt,
        prompt_field=name,
        prompts_count=count(prompt),
        reads_prefixes=body.task not in _BY_TOKEN,
        cache_salt=body.cache_salt,
        output_tokens_max=0,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def parse_scoring(received: Received) -> ApiCall:
    """`/score`, `/rerank`, their other paths, `/generative_scoring`; see `received.Parse`.

    How a model joins a pair, and whether it does at all, only its engine knows.
    """
    fields = json_object(received.body)
    body = checked(Body, fields)
    for names in _PAIRS:
        if all(fields.get(name) is not None for name in names):
            break
    else:
        shown = ", ".join(" and ".join(names) for names in _PAIRS)
        raise invalid("query", f"is required: send one of the pairs {shown}")
    first, second = (_side(fields[name], name) for name in names)
    return received.call(
        model=body.model or "",
        stream=False,
        prompt=opaque(*first, *second),
        prompt_field=names[1],
        prompts_count=max(len(first), 1) * max(len(second), 1) if len(first) == 1 else len(second),
        cache_salt=body.cache_salt,
        output_tokens_max=0,
    )


def parse_embed(received: Received) -> ApiCall:
    """`/v2/embed`, Cohere's; see `received.Parse`."""
    fields = json_object(received.body)
    body = checked(Body, fields)
    texts = fields.get("texts")
    known = [one for one in texts if isinstance(one, str)] if isinstance(texts, list) else []
    prompt = opaque(*known) if known else OpaquePrompt(pieces=(), texts_bytes=len(received.body))
    return received.call(
        model=body.model or "",
        stream=False,
        prompt=prompt,
        prompt_field="texts",
        prompts_count=max(1, len(known)),
        output_tokens_max=0,
    )


def _prompt(fields: dict[str, Any], body: _PoolingBody) -> tuple[str, Prompt]:
    value = fields.get("input")
    if "messages" in fields or _is_conversation(value):
        name = "messages" if "messages" in fields else "input"
        value = fields.get("messages", value)
        if isinstance(value, list) and value and isinstance(value[0], list):  # several of them
            return name, OpaquePrompt(pieces=(), texts_bytes=len(repr(value)))
        messages = checked(_Conversation, {"messages": value}).messages
        return name, chat_prompt(
            messages,
            name=name,
            opaque=body.padding is not None or body.truncates_end,
            chat_template=body.chat_template,
            template_kwargs=dict(body.chat_template_kwargs or {}),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
        )
    if value is None and "data" in fields:  # a plugin of the engine makes the prompt
        return "data", OpaquePrompt(pieces=(), texts_bytes=len(repr(fields["data"])))
    special = True if body.add_special_tokens is None else body.add_special_tokens
    prompt = prompt_of(value, "input", add_special_tokens=special)
    cut = body.truncates_end or body.padding is not None
    return "input", unless_cut(prompt, truncates_end=cut)


def _is_conversation(value: object) -> bool:
    """Whether `input` holds messages, or lists of them."""
    first = value[0] if isinstance(value, list) and value else None
    inner = first[0] if isinstance(first, list) and first else first
    return isinstance(inner, dict)


def _side(value: object, name: str) -> list[str]:
    side = value if isinstance(value, list) else [value]
    if len(side) > SIDES_MAX:
        raise invalid(name, f"holds {len(side)} texts; at most {SIDES_MAX}")
    return [one if isinstance(one, str) else repr(one) for one in side]
