"""The only writer of reservations: choose-and-book, first token, release.

Redis holds one ledger per router registration; `book.py` holds the same in memory and is the
authority: what Redis lost is sent again whole (`sync`), what it has too much is taken back. Notes
(awaited block, first token, release) are sent in order by one task and repeated until Redis has
answered, so neither a slow nor an absent Redis ever holds up an answer.
"""

import asyncio
import contextlib
import time
from functools import lru_cache
from typing import Final

import numpy as np
import structlog
from prometheus_client import Counter
from redis.exceptions import ResponseError

from indexer.contract import functions, reservations
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import BlockHash, FleetId
from indexer.contract.limits import CANDIDATES_PER_RESERVE_MAX, ROUTER_LEASE_RENEW_S
from indexer.contract.link import Link
from indexer.contract.milestones import Milestones
from indexer.contract.waits import Waits
from router import telemetry
from router.book import Book, Phase
from router.candidates import candidates, in_flight, with_counters
from router.decide import decide, rank, shortlist
from router.detector import Detection
from router.eligibility import take
from router.errors import IndexUnavailable, NoEligibleInstance
from router.index.redis_guard import Call, RedisGuard
from router.leases import Leases
from router.notes import Note, NoteKind, NoteQueue
from router.policies.base import Policy
from router.policies.lmetric import LMetric
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView

log = structlog.get_logger()

RESCORES_MAX: Final = 3
"""How often a policy scores again because the counters moved under its choice."""

NOTES_PER_SEND_MAX: Final = 256

NOTES_EVERY_S: Final = 0.005
"""So long after several notes others wait: under load many go together, for the price of one."""

RETRY_S: Final = 0.1


@lru_cache(maxsize=16)  # to find a series again costs more than to count
def _answered(status: bytes) -> Counter:
    return telemetry.RESERVATIONS.labels(status=status.decode())


class Ledger:
    """This router's reservations in every fleet it serves.

    `reserve` is awaited before dispatch; `awaits`, `prefilled` and `release` return at once.

    Args:
        link: to Redis.
        deadline_s: for one reservation, and for one send of notes.
        guard: shared with whoever else calls Redis for requests; None: one of its own.
    """

    def __init__(self, link: Link, *, deadline_s: float, guard: RedisGuard | None = None) -> None:
        self._link = link
        self._deadline_s = deadline_s
        self._guard = guard or RedisGuard(deadline_s=deadline_s)
        self._sends, self._pauses = Waits(deadline_s), Waits(ROUTER_LEASE_RENEW_S)
        self._failing = False
        self._crowded = False
        self._books: dict[FleetId, Book] = {}
        self._notes = NoteQueue()
        self._wake = asyncio.Event()
        self._leases = Leases(link, deadline_s=deadline_s, registered=self._wake.set)
        self._next_sequence = 1

    # -- one request ------------------------------------------------------------------------------

    async def reserve(
        self,
        policy: Policy,
        request: RequestView,
        snapshot: FleetSnapshot,
        milestones: Milestones | None = None,
        detection: Detection | None = None,
    ) -> tuple[Decision, Booking]:
        """Choose an instance by the counters of this moment and book the request on it.

        Args:
            policy: scores the instances.
            request: what is known of the request.
            snapshot: what is known of the fleet.
            milestones: of its prompt, for siblings in flight; None: they are not counted.
            detection: of its class, whose candidates the snapshot is; None: it is not counted.

        Raises:
            NoEligibleInstance: every candidate has gone meanwhile; a new look may find others.
            IndexUnavailable: Redis did not answer in time, or is not asked because it did not
                before.
        """
        book, sequence = self._book(snapshot), self._take_sequence()
        if book.fleet.epoch != snapshot.fleet.epoch:
            raise NoEligibleInstance("The fleet was founded anew meanwhile. Try again.")
        try:
            with self._guard.asking(Call.WRITE):
                await book.enter()
                try:
                    decision = await self._reserve(
                        book,
                        sequence,
                        policy=policy,
                        request=request,
                        snapshot=snapshot,
                        milestones=milestones,
                        detection=detection,
                    )
                finally:
                    book.leave()
        except REDIS_WEATHER as error:
            telemetry.RESERVATIONS.labels(status="unavailable").inc()
            self._note_failure(error)
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
        now_s = time.time()
        decision = decide(policy, request, book.as_counters(snapshot, now_s), booked_s=now_s)
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
        detection: Detection | None,
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
                await self._leases.register(book)
            if product:  # the function breaks ties by order, so the order is the lottery's
                places = shortlist(policy, request, snapshot, CANDIDATES_PER_RESERVE_MAX)
            else:
                scores = policy(request, snapshot)
                places = rank(scores, request, snapshot, CANDIDATES_PER_RESERVE_MAX)
            checked = not product and rescores < RESCORES_MAX
            rows = candidates(snapshot, places)
            call = reservations.reserve(
                book.fleet.fleet_id,
                book.router_id,
                sequence,
                rows,
                choice=-1 if product else 0,
                expected_batch_size=int(snapshot.batch_size[places[0]]) if checked else -1,
                in_flight=in_flight(snapshot, places, rows, milestones, checked=checked),
                slowness=snapshot.slowness_of(places) if product else None,
                prompt_tokens=request.prompt_tokens,
                classes=None if detection is None else detection.report(rows["slot"]),
            )
            status, index, states = await functions.run(self._link, call)
            _answered(status).inc()
            snapshot = with_counters(snapshot, places, states)
            match status:
                case b"ok":
                    return decide(
                        policy,
                        request,
                        snapshot,
                        place=int(places[index]),
                        booked_s=time.time(),
                        hot_class=None if detection is None else detection.noted(snapshot),
                    )
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

    def unbooked(
        self, policy: Policy, request: RequestView, snapshot: FleetSnapshot
    ) -> tuple[Decision, Booking]:
        """Choose for a request that costs its instance nothing that counts; nothing is booked."""
        decision = decide(policy, request, snapshot)
        return decision, Booking(fleet=self._book(snapshot).fleet, sequence=self._take_sequence())

    def awaits(self, booking: Booking, block: BlockHash) -> None:
        """Its prefill ends when its instance has stored this block; the sidecar tells Redis so.

        Of a ticket, which no instance stores, it tells when it has counted so far.

        This router does not hear of that: its book has the tokens queued until `prefilled` or
        `release`, and where Redis knows better a sync leaves it so. Idempotent.
        """
        book = self._books[booking.fleet.fleet_id]
        entry = book.entries.get(booking.sequence)
        if entry is not None and entry.phase == Phase.PREFILL:
            entry.awaited = block
            if entry.in_redis:
                self._note(Note(book, NoteKind.AWAITS, booking.sequence, (block,)))

    def prefilled(self, booking: Booking) -> None:
        """The first token has come: its prefill tokens are no longer queued. Idempotent."""
        book = self._books[booking.fleet.fleet_id]
        entry = book.entries.get(booking.sequence)
        if entry is not None and entry.phase == Phase.PREFILL:
            entry.phase, entry.prefill_tokens, entry.awaited = Phase.DECODE, 0, None
            if entry.in_redis:
                self._note(Note(book, NoteKind.PREFILLED, booking.sequence))

    def release(self, booking: Booking) -> None:
        """The body has ended, however. Idempotent."""
        book = self._books[booking.fleet.fleet_id]
        entry = book.entries.pop(booking.sequence, None)
        if entry is not None and entry.in_redis:
            self._note(Note(book, NoteKind.RELEASE, booking.sequence))

    def settled(self) -> bool:
        """Whether Redis has been told everything."""
        return not self._notes and not any(book.needs_sync for book in self._books.values())

    # -- the task that talks to Redis -------------------------------------------------------------

    async def run(self) -> None:
        """Send notes and renew leases until cancelled; then give everything back."""
        try:
            while True:
                self._wake.clear()
                begun_s = time.monotonic()
                try:
                    asked = await self._tend()
                except REDIS_WEATHER as error:
                    telemetry.LEDGER_ERRORS.inc()
                    self._guard.failed(Call.WRITE, begun_s, error)
                    self._note_failure(error)
                    await self._guard.until_retry(RETRY_S)
                    continue
                if self._failing:
                    log.info("ledger_recovered")
                    self._failing = False
                if asked:
                    self._guard.succeeded(Call.WRITE)
                if self._crowded:
                    await asyncio.sleep(NOTES_EVERY_S)
                with contextlib.suppress(TimeoutError), self._pauses.one():
                    await self._wake.wait()
        finally:
            await self._leases.leave(self._books.values())

    async def _tend(self) -> bool:
        """Tell, renew and sync what is due; whether Redis was asked anything.

        A fleet whose keys fail holds up nobody: the first failure is raised at the end.
        """
        asked, failures = bool(self._notes), list[Exception]()
        self._crowded = len(self._notes) > 1
        while self._notes and await self._send_notes(failures):
            pass  # whatever has come meanwhile goes with the next ones
        for book in list(self._books.values()):
            try:
                asked = await self._leases.tend(book) or asked
            except REDIS_WEATHER as error:
                book.needs_sync = True
                failures.append(error)
        if not all(isinstance(error, ResponseError) for error in failures):
            for book in self._books.values():  # Redis itself may come back with less
                book.needs_sync = True
        if failures:
            raise failures[0]
        return asked

    async def _send_notes(self, failures: list[Exception]) -> bool:
        """Send the oldest; whether to send more at once.

        Args:
            failures: to which one is added when Redis did not take them all.
        """
        batch = self._notes.take(NOTES_PER_SEND_MAX)
        calls = [note.call() for note in batch]
        try:
            with self._sends.one():
                replies = await functions.run_all(self._link, calls)
        except ResponseError as error:
            # Which one is refused is not known, and it would be for ever: a sync says the same.
            self._notes.told()
            for note in batch:
                note.book.needs_sync = True
            failures.append(error)
            return len(batch) == NOTES_PER_SEND_MAX
        except REDIS_WEATHER as error:
            self._notes.not_told(batch)
            failures.append(error)
            return False
        self._notes.told()
        for note, reply in zip(batch, replies, strict=True):
            note.counter().inc()
            if reply == -1:
                note.book.registered = False
        return len(batch) == NOTES_PER_SEND_MAX

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

    def _note_failure(self, error: BaseException) -> None:
        if not self._failing:
            log.warning("ledger_unavailable", error=repr(error))
        self._failing = True

    def _undo(self, book: Book, sequence: int) -> None:
        """Take back a reservation that may have been booked, or may still be."""
        self._note(Note(book, NoteKind.RELEASE, sequence))

    def _note(self, note: Note) -> None:
        if not self._notes.add(note):  # a sync says the same in fewer words
            for book in self._books.values():
                book.needs_sync = True
        self._wake.set()

    def _take_sequence(self) -> int:
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        return sequence
