"""Which content has left an engine of late, so that older evidence of it is not believed; pure."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.table.engine_block import EngineBlock

RECENT_REMOVALS_MAX: Final = 1 << 16
"""Blocks remembered; evidence that is older than all of them is not believed."""


class RecentRemovals:
    """Removals by the table's mark at which they came."""

    def __init__(self) -> None:
        # mark, hashes that ended in the block, hash before what it left of a canonical block
        self._recent: deque[tuple[int, bytes, BlockHash | None]] = deque(maxlen=RECENT_REMOVALS_MAX)
        self._void_before = 0

    def note(self, mark: int, block: EngineBlock) -> bool:
        """A block left; False when it cannot be told which content went with it."""
        if block.hashes is None:
            return False
        if block.rest is None:
            self._recent.append((mark, block.hashes, None))
            return True
        ancestor: EngineBlock | None = block
        while ancestor is not None and not ancestor.hashes:
            ancestor = ancestor.parent
        if ancestor is None:
            return False  # a part of the first canonical block: chains have no name before that
        self._recent.append((mark, block.hashes, block.rest.last))
        return True

    def void(self, mark: int) -> None:
        """Anything may have left: no evidence from before this mark is believed."""
        self._void_before = mark
        self._recent.clear()

    def uncontradicted(self, hashes: Sequence[BlockHash], since: int) -> Sequence[BlockHash]:
        """As much of a chain, from its root on, as did not leave after the mark `since`."""
        if since < self._void_before:
            return ()
        recent = self._recent
        if len(recent) == RECENT_REMOVALS_MAX and since < recent[0][0]:
            return ()
        left: set[BlockHash] = set()
        left_behind: set[BlockHash] = set()
        for mark, own, before in reversed(recent):
            if mark <= since:
                break
            left.update(block_hash.split(own))
            if before is not None:
                left_behind.add(before)
        for n, own in enumerate(hashes):
            if own in left:
                return hashes[:n]
            if own in left_behind:
                return hashes[: n + 1]
        return hashes
