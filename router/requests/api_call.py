"""What a client asked for, once its request has been read and checked."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Endpoint(StrEnum):
    """The completion endpoints, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation and what its template is given; names and defaults are vLLM's."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """One or more plain texts."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """One or more prompts that came as token ids, packed as little-endian u32."""

    packed: tuple[bytes, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One completion request.

    Attributes:
        endpoint: where it came in, and where it goes.
        body: as received; forwarded byte for byte.
        headers: the client's.
        request_id: the client's or a new one.
        model: the name asked for.
        stream: whether server-sent events are wanted.
        prompt: what to tokenize.
        prompts_count: 1, or more for a completion request with a list of prompts.
        choices_count: answers asked for each prompt; of several, each finds the others' blocks.
        reads_prefixes: whether the engine reuses resident blocks; with log probabilities of the
            prompt it computes every token.
        turn: earlier assistant messages; 0 for plain completions.
        cache_salt: separates prefixes; part of the hash root.
        output_tokens_max: the client's limit, if any.
        truncate_prompt_tokens: keep only so many last tokens; -1 for the model's limit.
        session_id: a hint of the client.
        policy: the policy asked for instead of the configured one.
        explain: the answer shall carry the decision.
    """

    endpoint: Endpoint
    body: bytes
    headers: tuple[tuple[str, str], ...]
    request_id: str
    model: str
    stream: bool
    prompt: Prompt
    prompts_count: int = 1
    choices_count: int = 1
    reads_prefixes: bool = True
    turn: int = 0
    cache_salt: str | None = None
    output_tokens_max: int | None = None
    truncate_prompt_tokens: int | None = None
    session_id: str | None = None
    policy: str | None = None
    explain: bool = False
