"""Takes the usage out of a stream that the router, not the client, has asked for. Pure."""

import re
from typing import Final

EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
"""As vLLM writes them, and as others do."""

HELD_BYTES_MAX: Final = 64 * 1024
"""Of an event that has not ended; one that is longer is no usage and goes on as it comes."""

_NO_CHOICES: Final = (b'"choices":[]', b'"choices": []')
_END: Final = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")
_USAGE: Final = (b'"usage":{', b'"usage": {')


class UsageFilter:
    """Whole events pass in the chunks they came in; only one that is cut waits for its end."""

    def __init__(self) -> None:
        self._held = b""

    def passes(self, chunk: bytes) -> bytes:
        """What of the stream goes on to the client now; may be nothing."""
        data = self._held + chunk if self._held else chunk
        end = max(at + len(mark) if (at := data.rfind(mark)) >= 0 else 0 for mark in EVENT_ENDS)
        if len(data) - end > HELD_BYTES_MAX:
            end = len(data)
        self._held, data = data[end:], data[:end]
        if not any(mark in data for mark in _NO_CHOICES):
            return data
        return b"".join(event for event in _END.split(data) if not _is_usage(event))

    def rest(self) -> bytes:
        """What is left at the end of the stream."""
        held, self._held = self._held, b""
        return held


def _is_usage(event: bytes) -> bool:
    """Whether an event is usage alone; in generated text the quotes would be escaped."""
    return any(mark in event for mark in _NO_CHOICES) and any(mark in event for mark in _USAGE)
