"""What Redis has still to be told of reservations: in order, bounded, told until it is taken."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from prometheus_client import Counter

from indexer.contract import reservations
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash
from router import telemetry
from router.book import Book

NOTES_MAX: Final = 16_384
"""Notes kept while Redis is away; beyond, the books are sent whole when it is back."""


class NoteKind(StrEnum):
    """What has happened to a request."""

    AWAITS = "awaits"
    PREFILLED = "prefilled"
    RELEASE = "release"


_TOLD_BY: Final[dict[NoteKind, Callable[..., Call]]] = {
    NoteKind.AWAITS: reservations.await_block,
    NoteKind.PREFILLED: reservations.prefilled,
    NoteKind.RELEASE: reservations.release,
}


@lru_cache(maxsize=len(NoteKind))  # to find a series again costs more than to count
def _counter(kind: NoteKind) -> Counter:
    return telemetry.LEDGER_NOTES.labels(kind=kind)


@dataclass(frozen=True, slots=True)
class Note:
    """One thing to be told.

    Attributes:
        book: of the request.
        kind: what has happened.
        sequence: the request.
        beside: what else belongs to it.
    """

    book: Book
    kind: NoteKind
    sequence: int
    beside: tuple[BlockHash, ...] = ()

    def counter(self) -> Counter:
        """Counts those of its kind that Redis has taken."""
        return _counter(self.kind)

    def call(self) -> Call:
        """What tells it, under the registration of this moment."""
        book = self.book
        return _TOLD_BY[self.kind](book.fleet.fleet_id, book.router_id, self.sequence, *self.beside)


class NoteQueue:
    """First in, first out; a batch that could not be told comes first again."""

    def __init__(self, notes_max: int = NOTES_MAX) -> None:
        self._notes_max = notes_max
        self._notes: deque[Note] = deque()
        self._taken = 0  # in a batch whose end is not known

    def __len__(self) -> int:
        return len(self._notes) + self._taken

    def add(self, note: Note) -> bool:
        """Keep a note; False: too many were waiting, and all of those were dropped for it."""
        dropped = len(self._notes) >= self._notes_max
        if dropped:
            self._notes.clear()
        self._notes.append(note)
        return not dropped

    def take(self, count: int) -> list[Note]:
        """The oldest ones, to be told; then `told` or `not_told`."""
        batch = [self._notes.popleft() for _ in range(min(count, len(self._notes)))]
        self._taken = len(batch)
        return batch

    def told(self) -> None:
        """Redis has taken the batch."""
        self._taken = 0

    def not_told(self, batch: list[Note]) -> None:
        """Redis may have taken any of the batch, or none: all of it is told again, first."""
        self._notes.extendleft(reversed(batch))
        self._taken = 0
