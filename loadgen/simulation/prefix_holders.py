"""Who holds which prefix, as the index knows it. Pure.

Blocks are named by the engines' own hashes: chained, and equal on all virtual engines, so they do
here what canonical hashes do in the real index.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from workers.simulated.kv_events import BlocksCleared, BlocksStored, KvEvent


class PrefixHolders:
    """Block hash -> slots that hold it, from the engines' events."""

    def __init__(self, slots_count: int) -> None:
        self._masks: dict[int, int] = {}
        self._copies = [Counter[int]() for _ in range(slots_count)]

    def apply(self, slot: int, events: Iterable[KvEvent]) -> None:
        """Take one engine's events, in their order; a hash may be stored and removed twice."""
        copies, masks, bit = self._copies[slot], self._masks, 1 << slot
        for event in events:
            if isinstance(event, BlocksStored):
                for name in event.block_hashes:
                    copies[name] += 1
                    masks[name] = masks.get(name, 0) | bit
                continue
            if isinstance(event, BlocksCleared):
                gone = list(copies.elements())
            else:
                gone = list(event.block_hashes)
            for name in gone:
                copies[name] -= 1
                if not copies[name]:
                    del copies[name]
                    masks[name] &= ~bit
                    if not masks[name]:
                        del masks[name]

    def depths(self, hashes: Sequence[int]) -> npt.NDArray[np.int64]:
        """Leading blocks of a chain that each slot holds; shape (slots,)."""
        depths = np.zeros(len(self._copies), np.int64)
        alive = (1 << len(self._copies)) - 1
        for depth, name in enumerate(hashes):
            held = alive & self._masks.get(name, 0)
            if held != alive:
                _set(depths, alive & ~held, depth)
                alive = held
                if not alive:
                    return depths
        _set(depths, alive, len(hashes))
        return depths


def _set(depths: npt.NDArray[np.int64], mask: int, depth: int) -> None:
    while mask:
        lowest = mask & -mask
        depths[lowest.bit_length() - 1] = depth
        mask ^= lowest
