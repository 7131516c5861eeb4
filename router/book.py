"""This router's reservations in one fleet, in memory: the authority over its ledger in Redis."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final

import numpy as np

from indexer.contract import reservations
from indexer.contract.identifiers import BlockHash, InstanceId, RouterId
from indexer.contract.records import FleetRecord
from router.errors import DegradedCause
from router.snapshot import Decision, FleetSnapshot

OTHERS_FADE_S: Final = 5.0
"""About as long as requests last: until then what others had is worth something, less and less."""


class Phase(IntEnum):
    """Where a request stands; the state byte of a reservation."""

    PREFILL = 0
    DECODE = 1


@dataclass(slots=True)
class Entry:
    """One reservation.

    Attributes:
        instance_id: the chosen instance.
        slot: its slot.
        generation: incarnation of that slot.
        prefill_tokens: new prefill tokens still queued there.
        context_tokens: that each of them attends to, on average.
        phase: whether they still are.
        in_redis: Redis has it, or may have it.
        booked_s: wall clock of the booking.
        awaited: block whose being stored ends the prefill; None when only the answer tells.
    """

    instance_id: InstanceId
    slot: int
    generation: int
    prefill_tokens: int
    context_tokens: int
    phase: Phase
    in_redis: bool
    booked_s: float
    awaited: BlockHash | None = None


def new_router_id() -> RouterId:
    """Identity of one registration."""
    return RouterId(uuid.uuid4().hex[:16])


@dataclass(slots=True)
class Book:
    """All reservations of this router in one fleet, and how its ledger in Redis stands.

    Attributes:
        fleet: the fleet as founded last, as far as is known here.
        adopted_s: wall clock of the snapshot that showed it so.
        router_id: the current registration.
        entries: by request sequence.
        registered: the registration is believed to live.
        needs_sync: the ledger in Redis may differ from `entries`.
        renewed_s: monotonic time of the last renewal.
        synced_s: monotonic time of the last sync.
        registering: held while a registration is under way.
    """

    fleet: FleetRecord
    adopted_s: float = 0.0
    router_id: RouterId = field(default_factory=new_router_id)
    entries: dict[int, Entry] = field(default_factory=dict)
    registered: bool = False
    needs_sync: bool = False
    renewed_s: float = float("-inf")
    synced_s: float = float("-inf")
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)
    _in_flight: int = 0  # reservations
    _opened: asyncio.Event = field(default_factory=asyncio.Event)
    _emptied: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._opened.set()

    def add(self, sequence: int, decision: Decision, *, in_redis: bool) -> None:
        """Enter a decision."""
        self.entries[sequence] = Entry(
            instance_id=decision.instance.instance_id,
            slot=decision.slot,
            generation=decision.generation,
            prefill_tokens=decision.new_prefill_tokens,
            context_tokens=decision.context_tokens,
            phase=Phase.PREFILL,
            in_redis=in_redis,
            booked_s=decision.booked_s or 0.0,
        )

    def adopt(self, snapshot: FleetSnapshot) -> None:
        """The fleet was founded anew: find the instances of all entries in their new slots.

        Requests on an instance that is not there (yet) leave the book; its engine reports them, so
        they count as foreign.
        """
        places = {record.instance_id: i for i, record in enumerate(snapshot.instances)}
        self.fleet, self.adopted_s = snapshot.fleet, snapshot.taken_s
        self.registered = False
        self.entries = {s: e for s, e in self.entries.items() if e.instance_id in places}
        for entry in self.entries.values():
            place = places[entry.instance_id]
            entry.slot, entry.generation = (
                int(snapshot.slot[place]),
                int(snapshot.generation[place]),
            )
            entry.in_redis = False

    def packed(self) -> bytes:
        """Every entry as `reservations.sync` takes them."""
        return b"".join(
            reservations.sync_row(
                *(sequence, e.slot, e.generation, e.prefill_tokens, e.phase),
                awaited=e.awaited,
                context_tokens=e.context_tokens,
            )
            for sequence, e in self.entries.items()
        )

    def as_counters(self, snapshot: FleetSnapshot, now_s: float) -> FleetSnapshot:
        """The snapshot with the best that can be said of its counters without Redis, degraded.

        That is this book's sums as they are, and of what the counters showed beyond this book the
        more the younger they are: other routers' requests end unseen. After OTHERS_FADE_S this
        router's own book is all; load balancers spread traffic evenly over routers, so it is a
        fair sample of everybody's.

        Args:
            snapshot: whose counters were read at `taken_s`.
            now_s: wall clock.
        """
        places = {
            key: place
            for place, key in enumerate(
                zip(snapshot.slot.tolist(), snapshot.generation.tolist(), strict=True)
            )
        }
        shape = (3, len(snapshot.slot))  # requests, queued prefill tokens, their attention
        own, counted = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for entry in self.entries.values():
            place = places.get((entry.slot, entry.generation))
            if place is not None:
                one = 1, entry.prefill_tokens, entry.prefill_tokens * entry.context_tokens
                own[:, place] += one
                if entry.in_redis and entry.booked_s <= snapshot.taken_s:
                    counted[:, place] += one
        queued = snapshot.queued_prefill_tokens
        seen = np.stack([snapshot.batch_size, queued, queued * snapshot.queued_context_tokens])
        age_s = max(0.0, now_s - snapshot.taken_s)
        others = np.maximum(seen - counted, 0) * max(0.0, 1.0 - age_s / OTHERS_FADE_S)
        batch_size, queued_prefill_tokens, pairs = own + np.rint(others).astype(np.int64)
        return replace(
            snapshot,
            batch_size=batch_size,
            queued_prefill_tokens=queued_prefill_tokens,
            queued_context_tokens=pairs // np.maximum(queued_prefill_tokens, 1),
            degraded=True,
            degraded_cause=snapshot.degraded_cause or DegradedCause.LEDGER_UNAVAILABLE,
        )

    async def enter(self) -> None:
        """A reservation begins; waits for a sync to end first. `leave` has to follow."""
        while not self._opened.is_set():
            await self._opened.wait()
        self._in_flight += 1

    def leave(self) -> None:
        """A reservation has ended, however."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._emptied.set()

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """While no reservation is in flight, so that `entries` is all there is. One at a time."""
        self._opened.clear()
        try:
            while self._in_flight:
                self._emptied.clear()
                await self._emptied.wait()
            yield
        finally:
            self._opened.set()
