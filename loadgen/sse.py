"""Pure: counts the tokens of a server-sent event stream without parsing each event.

A streamed answer is one event per token, thousands a second over all streams, so an event costs a
byte scan and a timestamp. Only the events up to the first non-empty token, and the last one, which
carries the usage or an error, are parsed as JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

EVENT_BYTES_MAX = 4 << 20  # one event with log probabilities is some kB


class MalformedStreamError(Exception):
    """The bytes are no server-sent events of an OpenAI-compatible server; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """What a finished stream told.

    Args:
        token_times_s: arrival of each token event, as given to `feed`; a server that packs several
            tokens into one event has fewer events than tokens.
        first_token_s: arrival of the first event with text; None when there was none.
        prompt_tokens, output_tokens, cached_tokens: from the usage event; None when not told.
        error: None for a whole stream; else "stream: ..." with the message of an error event, or
            "malformed: ..." with what is wrong.
    """

    token_times_s: tuple[float, ...]
    first_token_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    error: str | None


class EventScanner:
    """Takes the body piece by piece, as it arrives, and remembers when each event came."""

    __slots__ = (
        "_first_token_index",
        "_first_token_s",
        "_piece",
        "_piece_before",
        "_rest",
        "_times_s",
    )

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._rest = b""  # begun line
        self._piece = b""  # last complete lines with data
        self._piece_before = b""
        self._first_token_s: float | None = None
        self._first_token_index = 0

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take the next bytes of the body.

        Raises:
            MalformedStreamError: a line above the limit, or an event before the first token that is
                not JSON.
        """
        if self._rest:
            piece = self._rest + piece
        end = piece.rfind(b"\n") + 1
        self._rest = piece[end:]
        if end == 0:
            if len(self._rest) > EVENT_BYTES_MAX:
                raise MalformedStreamError(f"a line of more than {EVENT_BYTES_MAX} bytes")
            return
        lines = piece[:end] if self._rest else piece
        events = lines.count(b"\ndata:") + lines.startswith(b"data:")
        if events == 0:
            return  # blank lines, comments that keep the connection alive
        self._piece_before, self._piece = self._piece, lines
        if self._first_token_s is None:
            self._look_for_first_token(lines, now_s)
        if events == 1:
            self._times_s.append(now_s)
        else:
            self._times_s += [now_s] * events

    def close(self) -> StreamEnd:
        """Judge the stream when its body is complete, or as far as it came."""
        events = _data_of(self._piece_before + self._piece)
        done = bool(events) and events[-1] == b"[DONE]"
        trailing = int(done)
        error: str | None = None
        last: Mapping[str, object] = {}
        try:
            last = _json_object(events[-1 - trailing]) if len(events) > trailing else {}
        except MalformedStreamError as exc:
            error = f"malformed: {exc}"
        told_error = _error_of(last)
        if told_error is not None or not last.get("choices", True):
            trailing += 1  # an error or the usage is no token
        if told_error is not None:
            error = f"stream: {told_error}"
        elif error is None and not done:
            error = "malformed: the stream ended without data: [DONE]"
        elif error is None and self._first_token_s is None:
            error = "malformed: the stream has no token"
        usage = last.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("prompt_tokens_details")
        times_s = self._times_s[self._first_token_index : len(self._times_s) - trailing]
        return StreamEnd(
            token_times_s=tuple(times_s) if self._first_token_s is not None else (),
            first_token_s=self._first_token_s,
            prompt_tokens=_count(usage, "prompt_tokens"),
            output_tokens=_count(usage, "completion_tokens"),
            cached_tokens=_count(details, "cached_tokens") if isinstance(details, dict) else None,
            error=error,
        )

    def _look_for_first_token(self, lines: bytes, now_s: float) -> None:
        for index, event in enumerate(_data_of(lines)):
            if event != b"[DONE]" and _has_text(_json_object(event)):
                self._first_token_s = now_s
                self._first_token_index = len(self._times_s) + index
                return


def error_message(body: bytes) -> str | None:
    """The message inside an OpenAI-shaped JSON error; None when the body is something else."""
    try:
        return _error_of(_json_object(body))
    except MalformedStreamError:
        return None


def _data_of(lines: bytes) -> list[bytes]:
    """Payloads of the data lines."""
    return [line[5:].strip() for line in lines.splitlines() if line.startswith(b"data:")]


def _json_object(text: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise MalformedStreamError(f"event is not JSON: {text[:200]!r}") from exc
    if not isinstance(value, dict):
        raise MalformedStreamError(f"event is not a JSON object: {text[:200]!r}")
    return value


def _has_text(event: Mapping[str, object]) -> bool:
    """Whether the first choice of a completion or chat chunk carries something."""
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    if not isinstance(delta, dict):
        return bool(choices[0].get("text"))
    names = ("content", "reasoning", "reasoning_content", "tool_calls")
    return any(delta.get(name) for name in names)


def _error_of(event: Mapping[str, object]) -> str | None:
    error = event.get("error")
    if error is None:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)


def _count(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
