"""An instance's answer on its way to the client, and what its last bytes tell."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from indexer.contract.records import InstanceRecord
from router.instances.engine_connection import EngineConnection
from router.instances.http_wire import SWITCHING

EVENT_STREAM: Final = "text/event-stream"

DIGITS_MAX: Final = 18
"""Of a number of tokens."""

TAIL_CHUNKS: Final = 4
"""Last chunks kept of an answer: usage and `[DONE]` of a stream come in the last one to three."""

END_BYTES: Final = 64

_CACHED_TOKENS: Final = (b'"cached_tokens":', b'"cache_read_input_tokens":')
"""OpenAI's name and Anthropic's; in generated text the quotes would be escaped."""

_OUTPUT_TOKENS: Final = (b'"completion_tokens":', b'"output_tokens":')
"""Likewise."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """An instance's answer whose first byte is here.

    Attributes:
        instance: who answers.
        status: HTTP status.
        headers: end-to-end headers, in order.
        first: the first chunk of the body; empty when there is none.
        sent_s: monotonic time at which the request was handed to the connection.
        first_byte_s: monotonic time of the first chunk.
        connection: brings the rest of the body.
        event_stream: the body is a stream of server-sent events.
        encoded: the body is compressed: what it says is not read here.
        first_out_s: monotonic time at which the first chunk was passed on.
        output_bytes: passed on so far.
        tail: last chunks, for `cached_tokens`.
    """

    instance: InstanceRecord
    status: int
    headers: list[tuple[str, str]]
    first: bytes
    sent_s: float
    first_byte_s: float
    connection: EngineConnection
    event_stream: bool = field(default=False, init=False)
    encoded: bool = field(default=False, init=False)
    first_out_s: float | None = None
    output_bytes: int = 0
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_CHUNKS))

    def __post_init__(self) -> None:
        for name, value in self.headers:
            lowered = name.lower()
            if lowered == "content-type":
                self.event_stream = self.event_stream or value.startswith(EVENT_STREAM)
            elif lowered == "content-encoding":
                self.encoded = True

    @property
    def switched(self) -> bool:
        """Whether it is a WebSocket from here on."""
        return self.status == SWITCHING

    def forget_length(self) -> None:
        """The body will be changed on its way, so a told length would be wrong."""
        self.headers = [pair for pair in self.headers if pair[0].lower() != "content-length"]

    def end(self) -> bytes:
        """Its last piece passed on, at least as long as the mark that ends a stream."""
        return b"".join(list(self.tail)[-2:])[-END_BYTES:]

    def cached_tokens(self) -> int | None:
        """What the engine says it found in its KV$, when usage came with the answer."""
        return self._last_number(_CACHED_TOKENS)

    def output_tokens(self) -> int | None:
        """What the engine says it has generated, when usage came with the answer."""
        return self._last_number(_OUTPUT_TOKENS)

    def _last_number(self, fields: tuple[bytes, ...]) -> int | None:
        tail = b"".join(self.tail)
        ends = (at + len(name) for name in fields if (at := tail.rfind(name)) >= 0)
        last = max(ends, default=None)
        if last is None:
            return None
        number = tail[last:].lstrip()
        digits = number[: len(number) - len(number.lstrip(b"0123456789"))]
        return int(digits) if 0 < len(digits) <= DIGITS_MAX else None
