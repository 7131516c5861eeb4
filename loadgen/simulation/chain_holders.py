"""Who holds which prefix, as the index knows it: `PrefixHolders` over block identities. Pure."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.span import BlockChanges

_ONE = np.uint16(1)  # of the counts' type: numpy is 15 times slower with another one


class ChainHolders:
    """Block identity -> how many blocks each slot holds of it.

    Two bytes each, touched only where somebody held something.
    """

    def __init__(self, slots_count: int, identities_count: int) -> None:
        """Nobody holds anything; identities are below this count."""
        # Whole prompts computed again and again leave a block more of one content each time.
        self._counts = np.zeros((identities_count, slots_count), np.uint16)

    def apply(self, slot: int, changes: Iterable[BlockChanges]) -> None:
        """Take what one engine stored and evicted; a block may be stored and evicted twice."""
        column = self._counts[:, slot]
        for _, signed in changes:
            stored = signed >= 0
            if stored.all():
                np.add.at(column, signed, _ONE)
            elif not stored.any():
                np.subtract.at(column, ~signed, _ONE)
            else:
                np.add.at(column, signed[stored], _ONE)
                np.subtract.at(column, ~signed[~stored], _ONE)

    def depths(self, blocks: Identities) -> npt.NDArray[np.int64]:
        """Leading blocks of a chain that each slot holds; shape (slots,)."""
        if not len(blocks):
            return np.zeros(self._counts.shape[1], np.int64)
        counts = self._counts.take(blocks, axis=0)
        # The first of the smallest counts: the first zero, if there is one.
        depths: npt.NDArray[np.int64] = counts.argmin(axis=0)
        depths[counts[depths, np.arange(len(depths))] > 0] = len(blocks)
        return depths
