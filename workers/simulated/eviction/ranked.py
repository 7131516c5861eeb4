"""Blocks by a rank that each has while it is free. Pure."""

import heapq

_ENTRIES_PER_BLOCK_MAX = 4  # of the heap, over the blocks in it, before stale ones are thrown out
_ENTRIES_MIN = 64


class RankedBlocks:
    """Blocks, the lowest rank first, of equals the one that came first; O(log n) each.

    A heap whose entries are not searched for: a block that left, or has another rank now, leaves a
    stale entry, which whoever comes to it passes over.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # rank, number of arrival, block
        self._entry: dict[int, tuple[float, int, int]] = {}
        self._next_number = 0

    def __len__(self) -> int:
        """Blocks."""
        return len(self._entry)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entry

    def add(self, block_id: int, rank: float) -> None:
        """A block that is not here comes, behind those of equal rank."""
        number = self._next_number
        self._next_number = number + 1
        self._put((rank, number, block_id))

    def rank_anew(self, block_id: int, rank: float) -> None:
        """A block that is here has another rank; among equals it stands where it came."""
        _, number, _ = self._entry[block_id]
        self._put((rank, number, block_id))

    def remove(self, block_id: int) -> None:
        """A block that is here leaves."""
        del self._entry[block_id]

    def pop(self) -> int:
        """Take out the first. There must be one."""
        while True:
            found = heapq.heappop(self._heap)
            if self._entry.get(found[2]) == found:
                del self._entry[found[2]]
                return found[2]

    def _put(self, entry: tuple[float, int, int]) -> None:
        self._entry[entry[2]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > _ENTRIES_MIN + _ENTRIES_PER_BLOCK_MAX * len(self._entry):
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)
