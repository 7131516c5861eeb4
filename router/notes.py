"""What Redis has still to be told of reservations: in order, bounded, told until it is taken."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from indexer.contract.identifiers import BlockHash
from router.book import Book

NOTES_MAX: Final = 16_384
"""Notes kept while Redis is away; beyond, the books are sent whole when it is back."""


class NoteKind(StrEnum):
    """What has happened to a request."""

    AWAITS = "awaits"
    PREFILLED = "prefilled"
    RELEASE = "release"


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
