"""A fast engine in an event loop: starts its spans, ends them on time, cuts them. Pure."""

from collections.abc import Callable, Sequence
from functools import partial

from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.request import ChainRequest
from workers.simulated.fast.span import ChainAdmission, Reached

At = Callable[[float, Callable[[], None]], None]
"""Calls a function at a time, in seconds; never before now."""


class SpanDriver:
    """One engine and the moments it asks the loop for.

    A span that an arrival cuts has asked for a later end already: that moment comes and is passed
    over.
    """

    def __init__(
        self,
        engine: SpanEngine,
        at: At,
        *,
        admitted: Callable[[Sequence[ChainAdmission], float], None],
        reached: Callable[[Sequence[Reached], float], None],
    ) -> None:
        """Drive this engine.

        Args:
            engine: owned by the driver from now on, except for reading.
            at: the loop's.
            admitted: called with the requests that enter the batch, and when.
            reached: called with first and last tokens, and when; may add requests.
        """
        self.engine = engine
        self._at = at
        self._admitted = admitted
        self._reached = reached
        self._expected_s: float | None = None

    def add(self, request: ChainRequest, now_s: float) -> None:
        """Queue a request, now. Raises RequestTooLongError."""
        self.engine.add(request, now_s)
        self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        """Start a span if none is in progress; ask for its end if that is news."""
        engine = self.engine
        if engine.ends_s is None:
            span = engine.start(now_s)
            if span is not None and span.admissions:
                self._admitted(span.admissions, now_s)
        end_s = engine.ends_s
        if end_s is not None and end_s != self._expected_s:
            self._expected_s = end_s
            self._at(end_s, partial(self._end, end_s))

    def _end(self, now_s: float) -> None:
        if now_s != self.engine.ends_s:
            return  # cut meanwhile
        reached = self.engine.finish()
        if reached:
            self._reached(reached, now_s)
        self._go_on(now_s)
