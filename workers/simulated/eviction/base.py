"""What an engine's block pool and an eviction policy tell each other. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Category(NamedTuple):
    """Requests whose blocks are likely to be reused alike.

    Attributes:
        kind: type of request, as the workload names it; empty where it names none.
        turn: earlier answers in the prompt; 0 is a first turn.
    """

    kind: str
    turn: int


class EvictionOrder(ABC):
    """The free blocks of one instance, in the order of their eviction; starts with all, empty.

    A free block is one that no request holds, resident or empty. Empty ones go before all others:
    those freed without content, the last of them first, then those never used. What stands behind
    them is the policy: which resident block goes next.

    A policy is told more than it orders: of time, of who hits and who stores what. It may forget
    all of that. `take(n)` gives what n times `take(1)` would.

    Attributes:
        capacity_blocks: number of blocks; they are named 0 .. capacity_blocks - 1.
        now_s: time of what happens, as of the last `advance`: when a request was last admitted or
            ended. It stands still between, so that runs of equal steps need no clock.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.now_s = 0.0
        self._empty = list(range(capacity_blocks - 1, -1, -1))  # the next to go last
        self._resident_count = 0

    def __len__(self) -> int:
        """Free blocks."""
        return len(self._empty) + self._resident_count

    def advance(self, now_s: float) -> None:
        """It is this late; never earlier than before."""
        self.now_s = now_s

    def begin(self, request_id: str) -> None:  # noqa: B027  # a policy need not listen
        """A request enters the batch, perhaps again; its `touch`, if it hits, comes next."""

    def touch(  # noqa: B027  # likewise
        self, block_ids: Sequence[int], category: Category | None
    ) -> None:
        """A request has hit these resident blocks, free or in use; the free ones revive next."""

    def store(  # noqa: B027  # likewise
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """Blocks in use hold these contents from now on: equal numbers, equal contents."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Distinct resident blocks became free; of a chain, the tail comes first."""
        self._resident_count += len(block_ids)
        for block_id in block_ids:
            self._enter(block_id)

    def release_empty(self, block_id: int) -> None:
        """A block without content became free: the next to go."""
        self._empty.append(block_id)

    def revive(self, block_ids: Sequence[int]) -> None:
        """Free resident blocks were hit and are in use again."""
        self._resident_count -= len(block_ids)
        for block_id in block_ids:
            self._leave(block_id)

    def take(self, count: int) -> list[int]:
        """Take out the next `count` free blocks, the first to go first; there must be so many."""
        assert 0 <= count <= len(self), (count, len(self))
        empty = self._empty
        taken = [empty.pop() for _ in range(min(count, len(empty)))]
        evicted_count = count - len(taken)
        self._resident_count -= evicted_count
        taken += [self._evict() for _ in range(evicted_count)]
        return taken

    def clear(self) -> None:
        """All content is forgotten; every block is free. What was learnt may stay."""
        resident_count, self._resident_count = self._resident_count, 0
        self._empty += reversed([self._evict() for _ in range(resident_count)])

    @abstractmethod
    def _enter(self, block_id: int) -> None:
        """A resident block became free."""

    @abstractmethod
    def _leave(self, block_id: int) -> None:
        """A free resident block is in use again."""

    @abstractmethod
    def _evict(self) -> int:
        """Take out the next resident block; there is one."""
