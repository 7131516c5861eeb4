"""A streamed completion that breaks off goes on at another instance, where that can be exact.

The engine is asked to name its tokens (`return_token_ids`, vLLM 0.11 or newer). When the stream
breaks, the next instance is given the prompt's tokens and those whose text the client has, and told
to generate as many fewer. What it says comes under the id of the first answer, with the usage of
one. Tokens whose text was still held back (a character of several tokens) are generated again.

Exact means: for a sampled answer the same distribution, for a greedy one the same tokens, as far as
two engines compute alike. So only what depends on prompt and output as one sequence may be asked
for: no stop strings, no seeds of sampled answers, no log probabilities, no penalties on the output
alone, no grammar, one choice of one prompt. Chats are left alone: their parsers of reasoning and
tools have a state that no request can bring along. An event of several tokens may end within a
character, so behind one nothing can be continued until the next single token.

Only clients that an operator lets have it pay for reading every event.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from indexer.contract.identifiers import InstanceId
from router.errors import UpstreamCause, UpstreamFailed
from router.requests.api_call import ApiCall

PATH: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = 16
"""Of a completion that names no limit; vLLM's and OpenAI's."""

HELD_BYTES_MAX: Final = 256 * 1024
"""Of an event that has not ended; a stream with a longer one is passed on as it comes."""

SERVER_ERROR_MIN: Final = 500

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "
_COMMENT: Final = b":"

_COUNTS: Final = ("prompt_tokens", "completion_tokens")

_HARMLESS: Final = frozenset(
    {
        *("model", "prompt", "stream", "stream_options", "user", "priority", "session_id"),
        *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "cache_salt"),
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
        *("return_token_ids", "stream_interval"),
    }
)
"""What may be asked for; `repetition_penalty` looks at prompt and output alike."""

_HARMLESS_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
    "stop": (None, "", []),
    "seed": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""What may be asked for if it asks for nothing."""

_OF_THE_PROMPT: Final = frozenset(
    {"add_special_tokens", "truncate_prompt_tokens", "truncation_side"}
)
"""Has been done, once the prompt's tokens are known."""


class Sink(Protocol):
    """The client's side of the request."""

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; raises ClientGone."""
        ...


class ContinuedStream:
    """A stream on its way to the client, and what is needed to go on with it.

    Args:
        call: as the client sent it.
        fields: of its body.
        sink: where events go.
    """

    def __init__(self, call: ApiCall, fields: dict[str, Any], sink: Sink) -> None:
        self._call = call
        self._fields = fields
        self._sink = sink
        self._shows_ids = bool(fields.get("return_token_ids"))
        self._held = b""
        self._instance_id: InstanceId | None = None
        self._prompt: list[int] | None = None
        self._output: list[int] = []  # whose text the client has
        self._behind: list[int] = []  # told, without text so far
        self._exact = True
        self._strange = False  # not as vLLM writes streams: passed on as it comes
        self._ended = False
        self._names: dict[str, Any] = {}  # id and created of the first answer
        self.earlier_tokens = 0
        """Output tokens that came from the instances before this one."""

    @classmethod
    def of(cls, call: ApiCall, sink: Sink) -> "ContinuedStream | None":
        """The stream of a call, if it can be continued at all."""
        if call.endpoint != PATH or not call.stream or call.prompts_count != 1:
            return None
        fields: dict[str, Any] = json.loads(call.body)
        greedy = fields.get("temperature") == 0
        for name, value in fields.items():
            if name in _HARMLESS or (name == "seed" and greedy):
                continue
            if name not in _HARMLESS_VALUES or value not in _HARMLESS_VALUES[name]:
                return None
        return cls(call, fields, sink)

    # -- requests ---------------------------------------------------------------------------------

    def next_call(self, instance_id: InstanceId) -> ApiCall:
        """What this instance is asked."""
        self._instance_id, self._held, self._behind = instance_id, b"", []
        self.earlier_tokens = len(self._output)
        fields = self._fields | {"return_token_ids": True}
        if self._output:
            assert self._prompt is not None
            fields = {k: v for k, v in fields.items() if k not in _OF_THE_PROMPT}
            fields["prompt"] = self._prompt + self._output
            left = self._tokens_left()
            if left is not None:
                fields["max_tokens"] = left
            if fields.get("min_tokens"):
                fields["min_tokens"] = max(0, fields["min_tokens"] - len(self._output))
        return replace(self._call, body=json.dumps(fields, ensure_ascii=False).encode())

    def _tokens_left(self) -> int | None:
        limit = self._fields.get("max_tokens", DEFAULT_MAX_TOKENS)
        return None if limit is None else int(limit) - len(self._output)

    def continues_after(self, error: UpstreamFailed) -> bool:
        """Whether another instance can go on behind what the client has."""
        if error.cause is UpstreamCause.TOTAL_TIMEOUT:
            return False
        if self._ended or self._strange or not self._exact:
            return False
        if self._behind and self._shows_ids:
            return False
        left = self._tokens_left()
        return (self._prompt is not None or not self._output) and (left is None or left > 0)

    # -- answers ----------------------------------------------------------------------------------

    def wire(self) -> None:
        """Every event is looked at, so none goes past."""

    async def write(self, chunk: bytes) -> None:
        """Pass whole events on.

        Raises:
            ClientGone: nobody is there to take them.
            UpstreamFailed: the engine says in an event that it failed, and another can go on.
        """
        data = self._held + chunk
        end = data.rfind(_EVENT_END) + len(_EVENT_END) if _EVENT_END in data else 0
        if self._strange or len(data) - end > HELD_BYTES_MAX or b"\r\n\r\n" in data:
            self._strange, self._held = True, b""
            await self._sink.write(data)
            return
        self._held, passed = data[end:], b""
        try:
            for event in data[:end].split(_EVENT_END)[:-1]:
                passed += self._passed(event) + _EVENT_END
        finally:
            if passed:
                await self._sink.write(passed)

    async def finish(self) -> None:
        """Pass on what is left at the end of the stream."""
        if self._held:
            held, self._held = self._held, b""
            await self._sink.write(held)

    def _passed(self, event: bytes) -> bytes:
        """The event as the client gets it."""
        if not event or event.startswith(_COMMENT):
            return event
        if event.startswith(_DATA + b"[DONE]"):
            self._ended = True
            return event
        value = _value(event)
        if value is None:
            self._strange = True
            return event
        if "error" in value:
            self._refuse(value["error"])
            return event
        self._note(value)
        changed = self._rewrite(value)
        if not changed:
            return event
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return _DATA + text.encode("utf-8", "surrogatepass")

    def _refuse(self, error: Any) -> None:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code >= SERVER_ERROR_MIN:
            assert self._instance_id is not None
            failed = UpstreamFailed(
                self._instance_id,
                f"The instance {self._instance_id} failed in its answer ({code}). Try again.",
                before_first_byte=False,
                cause=UpstreamCause.STATUS,
            )
            if self.continues_after(failed):
                raise failed
        self._ended = True

    def _note(self, value: dict[str, Any]) -> None:
        """What of the answer is here by now."""
        for name in ("id", "created"):
            if name in value:
                self._names.setdefault(name, value[name])
        for choice in value.get("choices") or ():
            if self._prompt is None:
                self._prompt = choice.get("prompt_token_ids")
            token_ids = choice.get("token_ids") or []
            if choice.get("finish_reason") is not None:
                self._ended = True
            if not choice.get("text"):
                self._behind += token_ids
                continue
            self._output += self._behind + token_ids
            self._behind = []
            self._exact = len(token_ids) == 1

    def _rewrite(self, value: dict[str, Any]) -> bool:
        """Make it an event of the first answer; whether anything had to be changed."""
        changed = False
        for choice in value.get("choices") or ():
            for name in ("token_ids", "prompt_token_ids"):
                shown = self._shows_ids and not (name == "prompt_token_ids" and self.earlier_tokens)
                if choice.get(name) is not None and not shown:
                    choice[name] = None
                    changed = True
        for name, first in self._names.items():
            if value.get(name, first) != first:
                value[name] = first
                changed = True
        usage = value.get("usage")
        if self.earlier_tokens and isinstance(usage, dict):
            _merge(usage, self.earlier_tokens)
            changed = True
        return changed


def _value(event: bytes) -> dict[str, Any] | None:
    """What an event says, if it is of the shape that is read here."""
    if not event.startswith(_DATA + b"{"):
        return None
    try:
        value: dict[str, Any] = json.loads(event[len(_DATA) :])
    except ValueError:
        return None
    choices, usage = value.get("choices") or [], value.get("usage") or {}
    if not isinstance(choices, list) or not all(map(_is_choice, choices)):
        return None
    counts = [usage.get(name, 0) for name in _COUNTS] if isinstance(usage, dict) else [None]
    return value if all(isinstance(count, int) for count in counts) else None


def _is_choice(choice: Any) -> bool:
    return isinstance(choice, dict) and all(
        isinstance(choice.get(name) or [], list) for name in ("token_ids", "prompt_token_ids")
    )


def _merge(usage: dict[str, Any], earlier_tokens: int) -> None:
    """Of the second answer: its prompt holds output of the first."""
    usage["prompt_tokens"] = usage.get("prompt_tokens", 0) - earlier_tokens
    usage["completion_tokens"] = usage.get("completion_tokens", 0) + earlier_tokens
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
