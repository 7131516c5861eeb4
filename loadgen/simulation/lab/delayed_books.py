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
        # Requests, queued prefill tokens, and pairs of those with what they attend to: each
        # router's own now, and as the others know them.
        self._requests, self._requests_told = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._tokens, self._tokens_told = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._pairs, self._pairs_told = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._running, self._waiting = np.zeros(slots_count, np.int64), np.zeros(slots_count, int)
        self._kv_usage = np.zeros(slots_count)

    def book(
        self,
        router: int,
        slot: int,
        *,
        requests: int,
        tokens: int,
        context_tokens: int,
        now_s: float,
    ) -> None:
        """Add to, or with negative numbers take from, one router's book.

        Args:
            router: whose.
            slot: of the instance.
            requests: how many.
            tokens: new prefill tokens.
            context_tokens: that each of those attends to, on average; as when they were added.
            now_s: when.
        """
        pairs = tokens * context_tokens
        self._requests[router, slot] += requests
        self._tokens[router, slot] += tokens
        self._pairs[router, slot] += pairs

        def told() -> None:
            self._requests_told[router, slot] += requests
            self._tokens_told[router, slot] += tokens
            self._pairs_told[router, slot] += pairs

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
        books = (
            (self._requests, self._requests_told),
            (self._tokens, self._tokens_told),
            (self._pairs, self._pairs_told),
        )
        requests, tokens, pairs = (
            (now[router] + told.sum(axis=0) - told[router])[slot] for now, told in books
        )
        return replace(
            snapshot,
            batch_size=requests,
            queued_prefill_tokens=tokens,
            queued_context_tokens=pairs // np.maximum(tokens, 1),
            running_count=self._running[slot],
            waiting_count=self._waiting[slot],
            kv_usage_ratio=self._kv_usage[slot],
        )

    @property
    def is_empty(self) -> bool:
        """Nothing is booked."""
        return not (self._requests.any() or self._tokens.any())
