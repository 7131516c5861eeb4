"""What routers know of a fleet when word of each other's doings takes a while. Pure.

A router knows its own requests at once, and everything else as it was `staleness_s` ago: others'
requests, and what the engines report.
"""

from dataclasses import replace

import numpy as np

from loadgen.simulation.span_driver import At
from router.snapshot import FleetSnapshot


class DelayedBooks:
    """The books of every router over every slot."""

    def __init__(self, routers_count: int, slots_count: int, *, staleness_s: float, at: At) -> None:
        """Empty books.

        Args:
            routers_count: rows.
            slots_count: columns.
            staleness_s: how long word takes.
            at: the loop's.
        """
        shape = (routers_count, slots_count)
        self._staleness_s = staleness_s
        self._at = at
        # Requests and queued prefill tokens: each router's own now, and as the others know them.
        self._requests, self._requests_told = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._tokens, self._tokens_told = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._running, self._waiting = np.zeros(slots_count, np.int64), np.zeros(slots_count, int)
        self._kv_usage = np.zeros(slots_count)

    def book(self, router: int, slot: int, *, requests: int, tokens: int, now_s: float) -> None:
        """Add to, or with negative numbers take from, one router's book."""
        self._requests[router, slot] += requests
        self._tokens[router, slot] += tokens

        def told() -> None:
            self._requests_told[router, slot] += requests
            self._tokens_told[router, slot] += tokens

        self._at(now_s + self._staleness_s, told)

    def report(
        self,
        slot: int,
        *,
        running_count: int,
        waiting_count: int,
        kv_usage_ratio: float,
        now_s: float,
    ) -> None:
        """An engine's report sets out."""

        def told() -> None:
            self._running[slot], self._waiting[slot] = running_count, waiting_count
            self._kv_usage[slot] = kv_usage_ratio

        self._at(now_s + self._staleness_s, told)

    def seen(self, router: int, snapshot: FleetSnapshot) -> FleetSnapshot:
        """The snapshot with the counters that this router knows."""
        slot = snapshot.slot
        others = self._requests_told.sum(axis=0) - self._requests_told[router]
        others_tokens = self._tokens_told.sum(axis=0) - self._tokens_told[router]
        return replace(
            snapshot,
            batch_size=(self._requests[router] + others)[slot],
            queued_prefill_tokens=(self._tokens[router] + others_tokens)[slot],
            running_count=self._running[slot],
            waiting_count=self._waiting[slot],
            kv_usage_ratio=self._kv_usage[slot],
        )

    @property
    def is_empty(self) -> bool:
        """Nothing is booked."""
        return not (self._requests.any() or self._tokens.any())
