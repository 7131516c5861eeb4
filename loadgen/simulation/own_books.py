"""What routers that share no reservations know of a fleet. Pure.

As `router.unshared_ledger`: an instance's batch is this router's requests there now, and what the
engine last reported less this router's requests there at the time of that report; queued prefill
tokens are this router's own.
"""

from dataclasses import replace

import numpy as np

from router.snapshot import FleetSnapshot


class OwnBooks:
    """The books of every router; shapes (routers, slots)."""

    def __init__(self, routers_count: int, slots_count: int) -> None:
        shape = (routers_count, slots_count)
        self._requests = np.zeros(shape, np.int64)
        self._tokens = np.zeros(shape, np.int64)
        self._pairs = np.zeros(shape, np.int64)
        self._reported = np.zeros(shape, np.int64)

    def report(self, slot: int) -> None:
        """An engine reports at this moment."""
        self._reported[:, slot] = self._requests[:, slot]

    def book(
        self, router: int, slot: int, *, requests: int, tokens: int, context_tokens: int = 0
    ) -> None:
        """Add to, or with negative numbers take from, one router's book.

        Args:
            router: whose.
            slot: of the instance.
            requests: how many.
            tokens: new prefill tokens.
            context_tokens: that each of those attends to, on average; as when they were added.
        """
        self._requests[router, slot] += requests
        self._tokens[router, slot] += tokens
        self._pairs[router, slot] += tokens * context_tokens

    def counted(self, router: int, snapshot: FleetSnapshot) -> FleetSnapshot:
        """The snapshot with the counters that this router alone can know."""
        slot = snapshot.slot
        others = np.maximum(
            snapshot.running_count + snapshot.waiting_count - self._reported[router, slot], 0
        )
        return replace(
            snapshot,
            batch_size=self._requests[router, slot] + others,
            queued_prefill_tokens=self._tokens[router, slot],
            queued_context_tokens=self._pairs[router, slot]
            // np.maximum(self._tokens[router, slot], 1),
        )

    @property
    def is_empty(self) -> bool:
        """Nothing is booked."""
        return not (self._requests.any() or self._tokens.any())
