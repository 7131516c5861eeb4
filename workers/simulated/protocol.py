"""Request bodies of the OpenAI-compatible API -> typed calls. Pure; unknown fields are ignored.

Not simulated, and refused by name: log probabilities, beam search, prompt embeddings, `suffix`,
`echo`, multimodal content, a chat template sent along.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from workers.simulated.errors import bad_request, malformed
from workers.simulated.request import pack_tokens
from workers.simulated.sampling import check_sampling

CHOICES_MAX = 1024
"""Prompts times n in one call."""

SALT_CHARS_MAX = 1024
COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for /v1/completions."""

REFUSED_FIELDS = ("suffix", "prompt_embeds", "echo", "use_beam_search", "prompt_logprobs")
REFUSED_CHAT_FIELDS = ("echo", "use_beam_search", "prompt_logprobs", "continue_final_message")

Prompt = str | bytes
"""Text, or packed token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What both completion endpoints have in common.

    Attributes:
        model: served name; None means the server's own.
        max_tokens: answer length; None when the caller left it to the server.
        choice_count: answers per prompt (`n`).
        stream: answer as server-sent events.
        include_usage: a last chunk with token counts.
        continuous_usage: token counts in every chunk.
        return_token_ids: token ids beside the text.
        stop: strings that end an answer early.
        include_stop_text: leave the stop string in the answer.
        salt: cache salt.
        seed: selects the pseudo answer; None derives it from the prompt.
        request_id: id chosen by the caller in the body.
        session_id: session named in the body.
        add_special_tokens: as the tokenizer's own.
    """

    model: str | None
    max_tokens: int | None
    choice_count: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    stop: tuple[str, ...]
    include_stop_text: bool
    salt: str | None
    seed: int | None
    request_id: str | None
    session_id: str | None
    add_special_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessages:
    """The conversation of a chat call, with what its template needs.

    Attributes:
        messages: as sent, content flattened to text.
        tools: tool definitions, passed to the template.
        add_generation_prompt: end with the header of the assistant's turn.
        template_arguments: `chat_template_kwargs` and `documents`.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[object] | None = None
    add_generation_prompt: bool = True
    template_arguments: Mapping[str, object] = field(default_factory=dict)


class Body:
    """A JSON object with typed access; a wrong type is an error that names the field."""

    def __init__(self, raw: bytes) -> None:
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise malformed("", f"JSON decode error: {error}".replace("'", "")) from None
        if not isinstance(fields, dict):
            raise malformed("", "Input should be a valid dictionary")
        self.fields: dict[str, object] = fields

    def string(self, name: str) -> str | None:
        """A string, or None when absent or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise malformed(name, "Input should be a valid string")
        return value

    def integer(self, name: str) -> int | None:
        """An integer, or None when absent or null."""
        value = self.fields.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise malformed(name, "Input should be a valid integer")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """A boolean; the default when absent or null."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise malformed(name, "Input should be a valid boolean")
        return value

    def mapping(self, name: str) -> dict[str, object]:
        """An object; empty when absent or null."""
        value = self.fields.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise malformed(name, "Input should be a valid dictionary")
        return value

    def array(self, name: str) -> list[object] | None:
        """A list, or None when absent or null."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, list):
            raise malformed(name, "Input should be a valid list")
        return value


def parse_generation(body: Body, *, chat: bool) -> Generation:
    """The fields both endpoints share."""
    for name in REFUSED_CHAT_FIELDS if chat else REFUSED_FIELDS:
        if body.fields.get(name):
            raise bad_request(f"`{name}` is not supported by the simulated engine.", name)
    if body.fields.get("logprobs") not in (None, False):
        raise bad_request("`logprobs` is not supported by the simulated engine.", "logprobs")
    body.integer("priority")
    check_sampling(body.fields)
    max_tokens = _max_tokens(body, chat=chat)
    _check_min_tokens(body, max_tokens)
    body.boolean("ignore_eos")
    stream = body.boolean("stream")
    options = body.mapping("stream_options")
    if options and not stream:
        message = "Stream options can only be defined when `stream=True`."
        raise bad_request(message, "stream_options")
    return Generation(
        model=body.string("model"),
        max_tokens=max_tokens,
        choice_count=_choice_count(body),
        stream=stream,
        include_usage=bool(options) and options.get("include_usage", True) is True,
        continuous_usage=options.get("continuous_usage_stats") is True,
        return_token_ids=body.boolean("return_token_ids"),
        stop=_stop(body),
        include_stop_text=body.boolean("include_stop_str_in_output"),
        salt=_salt(body),
        seed=body.integer("seed"),
        request_id=body.string("request_id"),
        session_id=body.string("session_id"),
        add_special_tokens=body.boolean("add_special_tokens", default=not chat),
    )


def parse_prompts(body: Body, *, vocabulary_size: int) -> list[Prompt]:
    """`prompt`: text, token ids, a list of texts, or a list of lists of token ids."""
    name = "prompt"
    value = body.fields.get(name)
    if value is None or value in ("", []):
        raise bad_request(f"Either {name} or prompt_embeds must be provided and non-empty.", name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise malformed(name, "Input should be a valid string or list")
    if isinstance(value[0], int):
        return [pack_ids(value, name, vocabulary_size)]
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        if isinstance(item, str) and item and isinstance(value[0], str):
            prompts.append(item)
        elif isinstance(item, list) and item and isinstance(value[0], list):
            prompts.append(pack_ids(item, f"{name}.{index}", vocabulary_size))
        else:
            raise malformed(f"{name}.{index}", "Input should be a non-empty text or id list")
    return prompts


def parse_messages(body: Body) -> ChatMessages:
    """`messages` with what the chat template needs."""
    raw = body.array("messages")
    if not raw:
        raise bad_request("`messages` must contain at least one message.", "messages")
    if body.fields.get("chat_template") is not None:
        message = "Chat template is passed with request, but it is not trusted here."
        raise bad_request(message, "chat_template")
    arguments = body.mapping("chat_template_kwargs")
    documents = body.array("documents")
    return ChatMessages(
        messages=[_message(item, index) for index, item in enumerate(raw)],
        tools=body.array("tools") or None,
        add_generation_prompt=body.boolean("add_generation_prompt", default=True),
        template_arguments={**arguments, **({"documents": documents} if documents else {})},
    )


def pack_ids(token_ids: list[object], location: str, vocabulary_size: int) -> bytes:
    """Token ids of a body, checked and packed; packing is the type check."""
    try:
        packed = pack_tokens(cast("list[int]", token_ids))
    except (TypeError, OverflowError):
        raise malformed(location, "Input should be integers, 0 or greater") from None
    highest = max(cast("list[int]", token_ids))
    if highest >= vocabulary_size:
        raise bad_request(f"Token id {highest} is out of vocabulary", location)
    return packed


def _message(raw: object, index: int) -> Mapping[str, object]:
    location = f"messages.{index}"
    if not isinstance(raw, dict):
        raise malformed(location, "Input should be a valid dictionary")
    if not isinstance(raw.get("role"), str):
        raise malformed(f"{location}.role", "Input should be a valid string")
    content = raw.get("content")
    if content is None or isinstance(content, str):
        return raw
    if not isinstance(content, list):
        raise malformed(f"{location}.content", "Input should be a valid string or list")
    return {**raw, "content": "\n".join(_text_part(part, location) for part in content)}


def _text_part(part: object, location: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in ("text", "input_text"):
        raise bad_request(f"{location}: this model takes text parts only.", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise malformed(f"{location}.content.text", "Input should be a valid string")
    return text


def _max_tokens(body: Body, *, chat: bool) -> int | None:
    wanted = body.integer("max_completion_tokens") if chat else None
    if wanted is None:
        wanted = body.integer("max_tokens")
    if wanted is None:
        return None if chat else COMPLETION_TOKENS_DEFAULT
    if wanted < 1:
        raise bad_request(f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
    return wanted


def _check_min_tokens(body: Body, max_tokens: int | None) -> None:
    wanted = body.integer("min_tokens") or 0
    if wanted < 0:
        message = f"min_tokens must be greater than or equal to 0, got {wanted}."
        raise bad_request(message, "min_tokens")
    if max_tokens is not None and wanted > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {wanted}."
        raise bad_request(message, "min_tokens")


def _choice_count(body: Body) -> int:
    count = body.integer("n")
    if count is None:
        return 1
    if not 1 <= count <= CHOICES_MAX:
        raise bad_request(f"n must be between 1 and {CHOICES_MAX}, got {count}.", "n")
    return count


def _stop(body: Body) -> tuple[str, ...]:
    value = body.fields.get("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise malformed("stop", "Input should be a valid string or list of strings")
    if "" in value:
        raise bad_request("stop cannot contain an empty string.", "stop")
    return tuple(value)


def _salt(body: Body) -> str | None:
    salt = body.string("cache_salt")
    if salt is not None and not 1 <= len(salt) <= SALT_CHARS_MAX:
        message = f"Parameter 'cache_salt' must have 1 to {SALT_CHARS_MAX} characters."
        raise bad_request(message, "cache_salt")
    return salt
