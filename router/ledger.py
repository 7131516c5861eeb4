"""The only writer of reservations: choose-and-book, first token, release; this router's lease.

Redis holds one ledger per router registration; `book.py` holds the same in memory and is the
authority: what Redis lost is sent again whole (`sync`), what it has too much is taken back. Notes
(first token, release) are sent in order by one task and repeated until Redis has taken them, so
neither a slow nor an absent Redis ever holds up an answer.
"""

import asyncio
import contextlib
import time
from collections import deque
from typing import Final

import numpy as np
import structlog

from indexer.contract import functions, reservations
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId
from indexer.contract.limits import CANDIDATES_PER_RESERVE_MAX, ROUTER_LEASE_RENEW_S
from indexer.contract.link import Link
from indexer.contract.milestones import Milestones
from router import telemetry
from router.book import Book, Phase, new_router_id
from router.candidates import candidates, in_flight, with_counters
from router.decide import decide, lottery, rank
from router.eligibility import take
from router.errors import IndexUnavailable, NoEligibleInstance
from router.policies.base import Policy
from router.policies.lmetric import LMetric
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView

log = structlog.get_logger()

RESCORES_MAX: Final = 3
"""How often a policy scores again because the counters moved under its choice."""

NOTES_PER_SEND_MAX: Final = 256
NOTES_MAX: Final = 16_384
"""Notes kept while Redis is away; beyond, the books are sent whole when it is back."""

SYNC_EVERY_S: Final = 10.0
"""The longest that a ledger in Redis may differ from its book after a write whose outcome is
unknown."""

RETRY_S: Final = 0.1
SHUTDOWN_S: Final = 2.0

_NOTES: Final = {"prefilled": reservations.prefilled, "release": reservations.release}


class Ledger:
    """This router's reservations in every fleet it serves.

    `reserve` is awaited before dispatch; `prefilled` and `release` return at once.

    Args:
        link: to Redis.
        deadline_s: for one reservation, and for one send of notes.
    """

    def __init__(self, link: Link, *, deadline_s: float) -> None:
        self._link = link
        self._deadline_s = deadline_s
        self._books: dict[FleetId, Book] = {}
        self._notes: deque[tuple[Book, str, int]] = deque()
        self._wake = asyncio.Event()
        self._next_sequence = 1

    # -- one request ------------------------------------------------------------------------------

    async def reserve(
        self,
        policy: Policy,
        request: RequestView,
        snapshot: FleetSnapshot,
        milestones: Milestones | None = None,
    ) -> tuple[Decision, Booking]:
        """Choose an instance by the counters of this moment and book the request on it.

        Args:
            policy: scores the instances.
            request: what is known of the request.
            snapshot: what is known of the fleet.
            milestones: of its prompt, for siblings in flight; None: they are not counted.

        Raises:
            NoEligibleInstance: every candidate has gone meanwhile; a new look may find others.
            IndexUnavailable: Redis did not answer in time.
        """
        book, sequence = self._book(snapshot), self._take_sequence()
        if book.fleet.epoch != snapshot.fleet.epoch:
            raise NoEligibleInstance("The fleet was founded anew meanwhile. Try again.")
        try:
            async with asyncio.timeout(self._deadline_s), book.reserving():
                decision = await self._reserve(
                    book,
                    sequence,
                    policy=policy,
                    request=request,
                    snapshot=snapshot,
                    milestones=milestones,
                )
        except REDIS_WEATHER as error:
            telemetry.RESERVATIONS.labels(status="unavailable").inc()
            log.warning("reservation_failed", error=repr(error))
            self._undo(book, sequence)
            raise IndexUnavailable("The index (Redis) does not answer. Try again.") from error
        except asyncio.CancelledError:  # the client has gone
            self._undo(book, sequence)
            raise
        book.add(sequence, decision, in_redis=True)
        return decision, Booking(fleet=book.fleet, sequence=sequence)

    def reserve_alone(
        self, policy: Policy, request: RequestView, snapshot: FleetSnapshot
    ) -> tuple[Decision, Booking]:
        """Choose by the snapshot and this router's own book; Redis learns of it when it is back."""
        book, sequence = self._book(snapshot), self._take_sequence()
        decision = decide(policy, request, book.as_counters(snapshot), booked_s=time.time())
        if book.fleet.epoch == snapshot.fleet.epoch:
            book.add(sequence, decision, in_redis=False)
            book.needs_sync = True
            self._wake.set()
        return decision, Booking(fleet=book.fleet, sequence=sequence)

    async def _reserve(
        self,
        book: Book,
        sequence: int,
        *,
        policy: Policy,
        request: RequestView,
        snapshot: FleetSnapshot,
        milestones: Milestones | None,
    ) -> Decision:
        """Ask Redis until it has booked.

        For the product score the function itself takes the minimum. Any other policy names its
        choice and scores again when the choice's counters have moved, or anybody's new prefill
        tokens because of a sibling, a bounded number of times.
        """
        product = isinstance(policy, LMetric)
        rescores = 0
        while True:
            if not book.registered:
                await self._register(book)
            scores = policy(request, snapshot)
            places = rank(scores, request, snapshot, CANDIDATES_PER_RESERVE_MAX)
            if product:  # the function breaks ties by order, so the order is the lottery's
                places = places[np.argsort(lottery(request, snapshot)[places])]
            checked = not product and rescores < RESCORES_MAX
            call = reservations.reserve(
                book.fleet.fleet_id,
                book.router_id,
                sequence,
                candidates(snapshot, places),
                choice=-1 if product else 0,
                expected_batch_size=int(snapshot.batch_size[places[0]]) if checked else -1,
                in_flight=in_flight(snapshot, places, milestones, checked=checked),
            )
            status, index, states = await functions.run(self._link, call)
            telemetry.RESERVATIONS.labels(status=status.decode()).inc()
            snapshot = with_counters(snapshot, places, states)
            match status:
                case b"ok":
                    place = int(places[index])
                    return decide(policy, request, snapshot, place=place, booked_s=time.time())
                case b"moved":
                    rescores += 1
                case b"lost":
                    book.registered = False
                case b"gone" if product or len(places) == 1:
                    raise NoEligibleInstance("Every candidate has just gone away. Try again.")
                case b"gone":  # the one choice
                    others = np.delete(np.arange(len(snapshot.slot)), places[0])
                    snapshot = take(snapshot, others)
                case _:
                    raise AssertionError(status)

    def prefilled(self, booking: Booking) -> None:
        """The first token has come: its prefill tokens are no longer queued. Idempotent."""
        book = self._books[booking.fleet.fleet_id]
        entry = book.entries.get(booking.sequence)
        if entry is not None and entry.phase == Phase.PREFILL:
            entry.phase, entry.prefill_tokens = Phase.DECODE, 0
            if entry.in_redis:
                self._note(book, "prefilled", booking.sequence)

    def release(self, booking: Booking) -> None:
        """The body has ended, however. Idempotent."""
        book = self._books[booking.fleet.fleet_id]
        entry = book.entries.pop(booking.sequence, None)
        if entry is not None and entry.in_redis:
            self._note(book, "release", booking.sequence)

    def settled(self) -> bool:
        """Whether Redis has been told everything."""
        return not self._notes and not any(book.needs_sync for book in self._books.values())

    # -- the task that talks to Redis -------------------------------------------------------------

    async def run(self) -> None:
        """Send notes and renew leases until cancelled; then give everything back."""
        failing = False
        try:
            while True:
                self._wake.clear()
                try:
                    await self._tend()
                except REDIS_WEATHER as error:
                    telemetry.LEDGER_ERRORS.inc()
                    if not failing:
                        log.warning("ledger_unavailable", error=repr(error))
                    failing = True
                    for book in self._books.values():
                        book.needs_sync = True
                    await asyncio.sleep(RETRY_S)
                    continue
                if failing:
                    log.info("ledger_recovered")
                    failing = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ROUTER_LEASE_RENEW_S):
                        await self._wake.wait()
        finally:
            await self._leave()

    async def _tend(self) -> None:
        while self._notes:
            await self._send_notes()
        now_s = time.monotonic()
        for book in list(self._books.values()):
            if not book.registered or now_s - book.renewed_s >= ROUTER_LEASE_RENEW_S:
                async with asyncio.timeout(self._deadline_s):
                    await self._renew(book)
            if book.needs_sync or now_s - book.synced_s >= SYNC_EVERY_S:
                await self._sync(book)

    async def _send_notes(self) -> None:
        batch = [self._notes[i] for i in range(min(len(self._notes), NOTES_PER_SEND_MAX))]
        calls = [
            _NOTES[kind](book.fleet.fleet_id, book.router_id, sequence)
            for book, kind, sequence in batch
        ]
        async with asyncio.timeout(self._deadline_s):
            replies = await functions.run_all(self._link, calls)
        # Notes leave the queue only now: a failed batch is sent again, and each may be taken twice.
        for (book, kind, _), reply in zip(batch, replies, strict=True):
            self._notes.popleft()
            telemetry.LEDGER_NOTES.labels(kind=kind).inc()
            if reply == -1:
                book.registered = False

    async def _register(self, book: Book) -> None:
        async with book.registering:
            if book.registered:
                return
            fleet, router_id = book.fleet.fleet_id, new_router_id()
            # Whatever the earlier registration still has in Redis is sent again under this one.
            await functions.run(self._link, reservations.reap(fleet, book.router_id))
            await functions.run(self._link, reservations.register(fleet, router_id, begin=True))
            book.router_id, book.registered = router_id, True
            book.renewed_s = time.monotonic()
            book.needs_sync = bool(book.entries)
            log.info("router_registered", router_id=router_id, fleet=book.fleet.model_scope)
            self._wake.set()

    async def _renew(self, book: Book) -> None:
        if book.registered:
            call = reservations.register(book.fleet.fleet_id, book.router_id, begin=False)
            book.registered = await functions.run(self._link, call) == 1
            book.renewed_s = time.monotonic()
            if not book.registered:
                telemetry.LEASES_LOST.inc()
        await self._register(book)
        taken = await functions.run(self._link, reservations.reap(book.fleet.fleet_id))
        if taken:
            router_id, count = taken
            telemetry.REAPED.inc(count)
            log.warning("router_reaped", router_id=router_id.decode(), reservations=count)

    async def _sync(self, book: Book) -> None:
        """Send the whole book."""
        async with asyncio.timeout(self._deadline_s), book.quiet():
            for entry in book.entries.values():
                entry.in_redis = True
            call = reservations.sync(
                book.fleet.fleet_id,
                book.router_id,
                book.packed(),
                forget_tombstones=not book.needs_sync,
            )
            reply = await functions.run(self._link, call)
        if not reply:
            book.registered = False
            return
        added, taken = reply
        if added or taken:
            telemetry.LEDGER_CORRECTIONS.inc(added + taken)
            log.info("ledger_corrected", booked=added, taken_back=taken)
        book.needs_sync, book.synced_s = False, time.monotonic()

    async def _leave(self) -> None:
        """Give everything back, so that nobody has to wait for the lease to end."""
        with contextlib.suppress(*REDIS_WEATHER):
            async with asyncio.timeout(SHUTDOWN_S):
                for book in self._books.values():
                    if book.registered:
                        call = reservations.reap(book.fleet.fleet_id, book.router_id)
                        await functions.run(self._link, call)

    # -- small parts ------------------------------------------------------------------------------

    def _book(self, snapshot: FleetSnapshot) -> Book:
        """The fleet's book; a later snapshot may show that the fleet was founded anew."""
        book = self._books.get(snapshot.fleet.fleet_id)
        if book is None:
            book = Book(snapshot.fleet, adopted_s=snapshot.taken_s)
            self._books[snapshot.fleet.fleet_id] = book
        elif book.fleet.epoch != snapshot.fleet.epoch and snapshot.taken_s > book.adopted_s:
            book.adopt(snapshot)
            log.warning("fleet_adopted", fleet=book.fleet.model_scope, kept=len(book.entries))
        return book

    def _undo(self, book: Book, sequence: int) -> None:
        """Take back a reservation that may have been booked, or may still be."""
        self._note(book, "release", sequence)

    def _note(self, book: Book, kind: str, sequence: int) -> None:
        if len(self._notes) >= NOTES_MAX:  # a sync says the same in fewer words
            self._notes.clear()
            for each in self._books.values():
                each.needs_sync = True
        self._notes.append((book, kind, sequence))
        self._wake.set()

    def _take_sequence(self) -> int:
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        return sequence
