"""What a sidecar remembers of the last minutes, to judge reports about a moment in them; pure.

All times are of one local clock that never goes back.
"""

import math
from bisect import bisect_right
from collections import deque
from typing import Final

MARKS_MAX: Final = 4096
"""Marks remembered, one for each heartbeat: several minutes."""

CLOCK_SAMPLES: Final = 16
"""Latest heartbeats of which the quickest tells the other clock."""


class Marks:
    """What a growing count was at moments of the past."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, int]] = deque(maxlen=MARKS_MAX)

    def note(self, now_s: float, mark: int) -> None:
        """The count as it is now."""
        self._entries.append((now_s, mark))

    def at(self, moment_s: float) -> int | None:
        """A count that the moment cannot have been before; None when that is not remembered."""
        i = bisect_right(self._entries, moment_s, key=lambda entry: entry[0])
        return self._entries[i - 1][1] if i else None

    def clear(self) -> None:
        """Another count begins."""
        self._entries.clear()


class RemoteClock:
    """Another machine's clock, from answers that carry its time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=CLOCK_SAMPLES)

    def observe(self, sent_s: float, received_s: float, remote_s: float) -> None:
        """An answer told its time, between our sending and receiving."""
        self._samples.append(((received_s - sent_s) / 2, remote_s - (sent_s + received_s) / 2))

    def clear(self) -> None:
        """Another machine answers from now on."""
        self._samples.clear()

    def earliest_local_s(self, remote_s: float) -> float:
        """The earliest moment of our clock that may have been that one; -inf when unknown."""
        if not self._samples:
            return -math.inf
        error_s, offset_s = min(self._samples)
        return remote_s - offset_s - error_s
