"""The offline optimum: what is asked for again latest goes first. Pure."""

from collections.abc import Iterable, Sequence
from math import inf

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.ranked import RankedBlocks


class Future:
    """Which contents are asked for, in what order; shared by the instances of a fleet.

    A request that has begun on any of them is no future any more.
    """

    def __init__(self, requests: Iterable[tuple[str, Sequence[int]]]) -> None:
        """A future.

        Args:
            requests: in the order in which they are expected: name, and contents of the prompt's
                full blocks.
        """
        self.begun: list[Sequence[int]] = []  # contents of what has begun, the latest last
        self._place: dict[str, int] = {}
        self._contents: list[Sequence[int]] = []
        self._has_begun: list[bool] = []
        self._uses: dict[int, list[int]] = {}  # content -> places of requests, the next one last
        for place, (request_id, contents) in enumerate(requests):
            self._place[request_id] = place
            self._contents.append(contents)
            self._has_begun.append(False)
            for content in contents:
                self._uses.setdefault(content, []).append(place)
        for places in self._uses.values():
            places.reverse()

    def begin(self, request_id: str) -> None:
        """A request has begun; another time, or when it is not of this future, nothing happens."""
        place = self._place.get(request_id)
        if place is not None and not self._has_begun[place]:
            self._has_begun[place] = True
            self.begun.append(self._contents[place])

    def next_use(self, content: int) -> float:
        """Place of the first request still to come that asks for it; infinity: none does."""
        places = self._uses.get(content)
        while places:
            if not self._has_begun[places[-1]]:
                return places[-1]
            places.pop()
        return inf


class Belady(EvictionOrder):
    """The block whose content is asked for again latest goes first, of equals the LRU one.

    With one instance and blocks that are asked for one by one this is the optimum (Belady 1966).
    In a fleet it does not know where a request will go; closed loops change the order of what
    comes; a resident twin counts as much as the first. So it is a strong reference and no proof.
    """

    def __init__(self, capacity_blocks: int, future: Future) -> None:
        super().__init__(capacity_blocks)
        self._future = future
        self._seen_begun = 0
        self._free = RankedBlocks()
        self._content = [0] * capacity_blocks
        self._free_of: dict[int, list[int]] = {}  # content -> free blocks that hold it

    def begin(self, request_id: str) -> None:
        """What it asks for is asked for once less."""
        self._future.begin(request_id)

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """Remember what is where."""
        del category
        for block_id, content in zip(block_ids, contents, strict=True):
            self._content[block_id] = content

    def _enter(self, block_id: int) -> None:
        content = self._content[block_id]
        self._free_of.setdefault(content, []).append(block_id)
        self._free.add(block_id, -self._future.next_use(content))

    def _leave(self, block_id: int) -> None:
        self._free.remove(block_id)
        self._forget(block_id)

    def _evict(self) -> int:
        self._see_begun()
        block_id = self._free.pop()
        self._forget(block_id)
        return block_id

    def _see_begun(self) -> None:
        """Requests have begun, here or elsewhere: what they asked for comes later now."""
        begun = self._future.begun
        while self._seen_begun < len(begun):
            for content in begun[self._seen_begun]:
                for block_id in self._free_of.get(content, ()):
                    self._free.rank_anew(block_id, -self._future.next_use(content))
            self._seen_begun += 1

    def _forget(self, block_id: int) -> None:
        content = self._content[block_id]
        blocks = self._free_of[content]
        blocks.remove(block_id)
        if not blocks:
            del self._free_of[content]
