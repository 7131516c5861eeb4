"""What a client asked for, once its request has been read and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Cost(StrEnum):
    """What a request costs its engine."""

    PREFILL = "prefill"
    """The tokens of its prompt: it is tokenized, looked up and reserved."""

    NONE = "none"
    """Nothing that counts: any eligible instance, the least loaded one, and no reservation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation and what its template is given; names and defaults are vLLM's.

    Attributes:
        messages: as `requests.chat_messages` leaves them.
        tools: likewise.
        documents: of the request.
        chat_template: the request's own, instead of the model's.
        template_kwargs: further names that the template knows.
        add_generation_prompt: end with what an answer begins with.
        continue_final_message: leave the last message open.
        add_special_tokens: add them to what the template renders.
        merges_system: the API lets system messages stand between others, and they go to the first
            one where the template does not.
        said: the messages as the client sent them, for models that no template renders; empty:
            nothing is known of what these are given; None: a template renders it for any model.
        effort: how much to reason, for the same.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    merges_system: bool = False
    said: Sequence[Mapping[str, Any]] | None = field(default=None, compare=False)
    effort: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """One or more plain texts."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """One or more prompts that came as token ids, packed as little-endian u32."""

    packed: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaquePrompt:
    """A prompt whose token ids only the engine knows.

    Attributes:
        pieces: texts, roles and identities of media in the order of the conversation; two prompts
            whose first pieces are equal have a prefix in common.
        media_count: how many of the pieces stand for an image, a sound, a film.
        texts_bytes: length of all texts together, as UTF-8.
    """

    pieces: tuple[str, ...]
    media_count: int = 0
    texts_bytes: int = 0


Prompt = ChatPrompt | TextPrompt | TokenPrompt | OpaquePrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One request for an engine.

    Attributes:
        method: of HTTP.
        path: where it came in, and where it goes, with its query string, as it was sent.
        endpoint: the path of the table of endpoints; for metrics, a bounded set.
        cost: what it costs the engine.
        body: forwarded byte for byte; as received, unless an option of the operator changed it.
        headers: the client's.
        request_id: the client's or a new one.
        model: the name asked for; empty where the request names none and need not.
        stream: whether server-sent events are wanted.
        prompt: what to tokenize.
        prompt_field: the body's field that holds the prompt, for messages.
        prompts_count: 1, or more for a request with a list of prompts.
        choices_count: answers asked for each prompt; of several, each finds the others' blocks.
        reads_prefixes: whether the prompt's resident blocks count; with log probabilities of the
            prompt the engine computes every token, and behind a conversation that only the engine
            knows the prompt does not begin with what is known of it.
        tells_cached_tokens: whether the answer's usage is the engine's word about this prompt
            alone.
        hides_usage: usage was asked for on behalf of the router; the client does not see it.
        turn: earlier assistant messages; of a plain completion, what the client says, else 0.
        history_share: of the prompt, up to the end of the last of them; None: not known.
        cache_salt: separates prefixes; part of the hash root.
        output_tokens_max: the client's limit, if any; 0 where nothing is generated.
        truncate_prompt_tokens: keep only so many last tokens; -1 for the model's limit.
        names_response: id of an earlier answer that the engine which gave it holds.
        keeps_answer: the engine may hold the answer, for requests that name it.
        session_id: a hint of the client.
        policy: the policy asked for instead of the configured one.
        asked_instances: the header that names the only instances that may be chosen.
        explain: the answer shall carry the decision.
        upgrades: it asks to go on as a WebSocket.
    """

    method: str = "POST"
    path: str
    endpoint: str = ""
    cost: Cost = Cost.PREFILL
    body: bytes
    headers: tuple[tuple[str, str], ...]
    request_id: str
    model: str
    stream: bool
    prompt: Prompt
    prompt_field: str = "prompt"
    prompts_count: int = 1
    choices_count: int = 1
    reads_prefixes: bool = True
    tells_cached_tokens: bool = True
    hides_usage: bool = False
    turn: int = 0
    history_share: float | None = None
    cache_salt: str | None = None
    output_tokens_max: int | None = None
    truncate_prompt_tokens: int | None = None
    names_response: str | None = None
    keeps_answer: bool = False
    session_id: str | None = None
    policy: str | None = None
    asked_instances: str | None = None
    explain: bool = False
    upgrades: bool = False
