"""Whether Redis is asked at all: calls that fail in a row open it, probes close it. Pure.

    closed --- calls unanswered in a row for a while, or a broken connection --> open
    open ----- as many good probes in a row as it takes ---------------------> closed

One stall fails every call that is on its way, however many these are: therefore it takes both
FAILURES_MAX calls in a row and `silence_s` since the first of them began.

One good probe is enough; after a relapse within RELAPSE_S it takes twice as many as before, up to
PROBES_MAX, so that a Redis which answers now and then is not believed each time.
"""

from dataclasses import dataclass
from typing import Final

FAILURES_MAX: Final = 3
"""One late answer, or two, are no outage, however long nothing was asked in between."""

PROBE_EVERY_S: Final = 0.2
PROBES_MAX: Final = 4
"""Times PROBE_EVERY_S: how much longer than Redis is away decisions are made without it."""

RELAPSE_S: Final = 10.0


@dataclass(slots=True)
class Breaker:
    """State and reasons; all times are monotonic seconds of the caller's clock.

    Attributes:
        silence_s: the shortest that is no stall but an outage; longer than one call may take.
        is_open: calls are refused at once.
        opened_s: when that began.
        reason: what the call that opened it ran into.
    """

    silence_s: float
    is_open: bool = False
    opened_s: float = 0.0
    reason: str = ""
    _closed_s: float = float("-inf")
    _failures: int = 0
    _failing_since_s: float = 0.0
    _probes: int = 0
    _probes_needed: int = 1

    def failed(self, begun_s: float, now_s: float, reason: str, *, broken: bool) -> bool:
        """A call was not answered; whether this opens it.

        Args:
            begun_s: when the call began: what began before the last outage ended says nothing new.
            now_s: now.
            reason: for whoever asks why.
            broken: there is no connection, so that waiting for two more calls tells nothing.
        """
        if self.is_open or begun_s < self._closed_s:
            return False
        if self._failures == 0:
            self._failing_since_s = begun_s
        self._failures += 1
        silent_s = now_s - self._failing_since_s
        if not broken and (self._failures < FAILURES_MAX or silent_s < self.silence_s):
            return False
        relapsed = now_s - self._closed_s < RELAPSE_S
        self._probes_needed = min(2 * self._probes_needed, PROBES_MAX) if relapsed else 1
        self._probes = 0
        self.is_open, self.opened_s, self.reason = True, now_s, reason
        return True

    def succeeded(self) -> None:
        """A call was answered in time. While open only probes count: all others are older."""
        self._failures = 0

    def probed(self, now_s: float, *, answered: bool) -> bool:
        """A probe has ended; whether this closes it."""
        if not self.is_open:
            return False
        self._probes = self._probes + 1 if answered else 0
        if self._probes < self._probes_needed:
            return False
        self.is_open, self._failures, self._closed_s = False, 0, now_s
        return True
