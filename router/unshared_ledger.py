"""A ledger that shares nothing, for measuring what reservations are worth."""

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import Final

import numpy as np
import structlog

from indexer.contract.link import Link
from indexer.contract.milestones import Milestones
from router.book import Book
from router.decide import decide
from router.detector import Detection
from router.index.redis_guard import RedisGuard
from router.ledger import Ledger
from router.policies.base import Policy
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView

log = structlog.get_logger()

ENDED_KEPT_S: Final = 5.0
"""How long ended requests are remembered: an older report has no living lease beside it."""


class UnsharedLedger(Ledger):
    """This router's requests, in its memory only: nobody learns of them, nor it of anybody's.

    Of other traffic it knows what engines report (running + waiting) beyond its own requests: an
    instance's batch size is its own requests there now, and what the last report said less its own
    requests there at the time of that report. So none of its own is counted twice: one sent since
    the report is in the first part only, one that ended since is in neither. An instance's queued
    prefill tokens are its own alone, because engines do not report them; those of a plain answer
    or of several prompts stay queued until it ends: only shared ledgers hear from sidecars.

    Arguments as of `Ledger`.
    """

    def __init__(self, link: Link, *, deadline_s: float, guard: RedisGuard | None = None) -> None:
        super().__init__(link, deadline_s=deadline_s, guard=guard)
        # slot, generation, booked_s, ended_s (wall clock), by the order of their ends
        self._ended: deque[tuple[int, int, float, float]] = deque()
        log.warning(
            "reservations_not_shared",
            hint="share_reservations is false: routers do not see each other's requests; "
            "this is for measurements only",
        )

    async def reserve(
        self,
        policy: Policy,
        request: RequestView,
        snapshot: FleetSnapshot,
        milestones: Milestones | None = None,  # noqa: ARG002 - siblings are shared reservations
        detection: Detection | None = None,  # noqa: ARG002 - and classes are counted with them
    ) -> tuple[Decision, Booking]:
        """Choose by the engines' reports and this router's own requests."""
        return self.reserve_alone(policy, request, snapshot)

    def reserve_alone(
        self, policy: Policy, request: RequestView, snapshot: FleetSnapshot
    ) -> tuple[Decision, Booking]:
        """The same: no decision here needs Redis."""
        book, sequence = self._book(snapshot), self._take_sequence()
        now_s = time.time()
        decision = decide(policy, request, self._counted(book, snapshot, now_s), booked_s=now_s)
        if book.fleet.epoch == snapshot.fleet.epoch:
            book.add(sequence, decision, in_redis=False)
        return decision, Booking(fleet=book.fleet, sequence=sequence)

    def release(self, booking: Booking) -> None:
        """The body has ended, however. Idempotent."""
        entry = self._books[booking.fleet.fleet_id].entries.get(booking.sequence)
        if entry is not None:
            ended_s = time.time()
            self._ended.append((entry.slot, entry.generation, entry.booked_s, ended_s))
            while self._ended[0][3] < ended_s - ENDED_KEPT_S:
                self._ended.popleft()
        super().release(booking)

    async def run(self) -> None:
        """Hold no lease and send nothing, until cancelled."""
        await asyncio.Event().wait()

    def _counted(self, book: Book, snapshot: FleetSnapshot, now_s: float) -> FleetSnapshot:
        """The snapshot with batch sizes and queues as this router alone can know them."""
        places = {
            key: place
            for place, key in enumerate(
                zip(snapshot.slot.tolist(), snapshot.generation.tolist(), strict=True)
            )
        }
        # Ages and this clock are both in seconds; only their zero differs from Redis's.
        reported_s = snapshot.taken_s - snapshot.counters_age_s
        own, queued, pairs, reported = (np.zeros(len(places), np.int64) for _ in range(4))
        for entry in book.entries.values():
            place = places.get((entry.slot, entry.generation))
            if place is not None:
                own[place] += 1
                queued[place] += entry.prefill_tokens
                pairs[place] += entry.prefill_tokens * entry.context_tokens
                reported[place] += entry.booked_s <= reported_s[place]
        for slot, generation, booked_s, ended_s in self._ended:
            place = places.get((slot, generation))
            if place is not None and ended_s >= now_s - ENDED_KEPT_S:
                reported[place] += booked_s <= reported_s[place] < ended_s
        others = np.maximum(snapshot.running_count + snapshot.waiting_count - reported, 0)
        return replace(
            snapshot,
            batch_size=own + others,
            queued_prefill_tokens=queued,
            queued_context_tokens=pairs // np.maximum(queued, 1),
        )
