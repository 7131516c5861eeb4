"""What a reader of an engine's events has had so far, and what another batch means to it; pure."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from indexer.errors import EngineRestarted, ReplayFailed

DIGESTS_MAX: Final = 20_000
"""Batches that are known again: all that may come once from the ring and once more live."""


class Position(NamedTuple):
    """A batch, and what it was."""

    sequence: int
    digest: int  # of its payload, which carries the time it was made


@dataclass(frozen=True, slots=True)
class Received:
    """The next batch."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches from `first` up to, not including, `resumes_at` are lost for good.

    When both are the same, none may be lost, but nothing shows that the same process goes on.
    """

    first: int
    resumes_at: int


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is not one of the protocol's; skipped."""

    frames_count: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay has ended.

    Attributes:
        failed: it broke off.
        given_up: no more are tried.
        checks: how many had been asked for when it began.
        filled_count: batches that had been missed and came with it.
    """

    failed: bool = False
    given_up: bool = False
    checks: int = 0
    filled_count: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """Without a ring: what had waited when it was asked for is delivered.

    `overflowed` when more waited than the socket holds, so that the newest may have been dropped.
    """

    overflowed: bool


@dataclass(frozen=True, slots=True)
class Again:
    """A batch of a resynchronisation, from the engine's very first one on."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Resynchronised:
    """A resynchronisation has ended: every batch so far came as `Again`, or why that cannot be."""

    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The ring was asked about the position to resume from; `refused`: it is another engine's."""

    refused: str | None = None


Item = Received | Gap | Malformed | Replayed | Drained | Again | Resynchronised | Resumed


class History:
    """The last batches of one engine process."""

    def __init__(self) -> None:
        self.last: int | None = None
        self._digests: dict[int, int] = {}

    @property
    def next(self) -> int:
        """Sequence of the batch that would simply follow."""
        return 0 if self.last is None else self.last + 1

    def position(self, sequence: int) -> Position | None:
        """One of the last batches; None when it is not remembered."""
        digest = self._digests.get(sequence)
        return None if digest is None else Position(sequence, digest)

    def resume(self, position: Position) -> None:
        """Go on behind a batch."""
        self.last = position.sequence
        self._digests[position.sequence] = position.digest
        if len(self._digests) > DIGESTS_MAX:
            del self._digests[next(iter(self._digests))]

    def deliver(self, sequence: int, payload: bytes) -> Received:
        """Take the next batch."""
        self.resume(Position(sequence, digest_of(payload)))
        return Received(sequence, payload)

    def is_known(self, sequence: int, payload: bytes) -> bool:
        """Whether this very batch was among the last ones."""
        return self._digests.get(sequence) == digest_of(payload)

    def take_live(self, sequence: int, payload: bytes) -> list[Item]:
        """What a live batch amounts to."""
        if sequence < self.next:
            return []
        lost: list[Item] = [] if sequence == self.next else [Gap(self.next, sequence)]
        return [*lost, self.deliver(sequence, payload)]

    def take_replayed(self, sequence: int, payload: bytes, *, is_first: bool) -> list[Item]:
        """What a batch out of the ring amounts to.

        Args:
            sequence: its number; the ring was asked from the last one on.
            payload: as it was sent.
            is_first: whether it is the first one of the answer.

        Raises:
            EngineRestarted: it is another one than that which was delivered under this number.
            ReplayFailed: batches are missing within the answer.
        """
        if sequence < self.next:
            if sequence in self._digests and not self.is_known(sequence, payload):
                raise EngineRestarted(f"batch {sequence} is another one now")
            return []
        if sequence > self.next and not is_first:
            raise ReplayFailed(f"the replay skipped {self.next} to {sequence}")
        items = self.take_live(sequence, payload)
        if len(items) == 1 and is_first and sequence > 0:
            # The ring has just lost the one batch that would have shown whose ring it is.
            return [Gap(sequence, sequence), *items]
        return items


def digest_of(payload: bytes) -> int:
    """What tells two batches of one sequence apart."""
    return xxhash.xxh3_64_intdigest(payload)
