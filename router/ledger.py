"""The only writer of reservations: choose-and-book, first token, release; this router's lease."""

from collections.abc import Mapping

import redis.asyncio

from router.policies.base import Policy
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView


class Ledger:
    """This router's reservations in every fleet it serves.

    `reserve` is awaited before dispatch. `prefilled` and `release` return at once: they are queued
    and sent in order by `run`, and repeated until Redis has taken them.
    """

    def __init__(self, redis: redis.asyncio.Redis, *, deadline_s: float) -> None: ...

    async def run(self) -> None:
        """Send queued notes and renew the lease until cancelled; then release everything."""

    async def reserve(
        self, policy: Policy, request: RequestView, snapshot: FleetSnapshot
    ) -> tuple[Decision, Booking]:
        """Choose an instance by the counters of this moment and book the request on it.

        When Redis does not answer in time the choice is made from the snapshot and this router's own
        bookkeeping, and the decision is degraded.

        Raises:
            NoEligibleInstance: every candidate has gone meanwhile.
        """
        ...

    def prefilled(self, booking: Booking) -> None:
        """The first token has come: its prefill tokens are no longer queued. Idempotent."""

    def release(self, booking: Booking) -> None:
        """The body has ended, however. Idempotent."""
