"""Blocks that an engine has computed by what routers say, forgotten about as it forgets; pure.

Engines evict the end of the chain that was used longest ago first. So does this: a chain that is
used moves to the young end as a whole, its last block first, hence a block is always younger than
those behind it, and the oldest one has none behind it. What is published is thus prefix-closed at
every moment. What the engine really holds is not known: all of this is an estimate.
"""

from collections import OrderedDict
from collections.abc import Sequence

from indexer.contract.identifiers import BlockHash
from indexer.table.changes import NOTHING, Delta


class LearnedBlocks:
    """Canonical hashes by the time of their last use, oldest first.

    Attributes:
        blocks_max: of the engine's KV$, in canonical blocks: more are never held.
        learned_count: blocks learned so far.
        unanchored_count: chains whose beginning was forgotten before their end was told.
    """

    def __init__(self, blocks_max: int) -> None:
        assert blocks_max >= 0, blocks_max
        self.blocks_max = blocks_max
        self.learned_count = 0
        self.unanchored_count = 0
        # -> the hash before it, and what the engine had computed at its last use
        self._blocks: OrderedDict[BlockHash, tuple[BlockHash | None, float]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        """Whether a block is held."""
        return block in self._blocks

    def published(self) -> list[BlockHash]:
        """Every block, parents before children."""
        return list(reversed(self._blocks))

    def learn(
        self, hashes: Sequence[BlockHash], *, first_block: int = 0, computed_blocks: float = 0.0
    ) -> Delta:
        """The engine has just computed, or used, a chain.

        Args:
            hashes: of the chain from `first_block` on; when that is above 0, the first one is held
                already, else nothing is learned.
            first_block: place of the first one in the chain.
            computed_blocks: what the engine had computed so far, for `expire`; it never shrinks.
        """
        blocks = self._blocks
        if first_block and (not hashes or hashes[0] not in blocks):
            self.unanchored_count += 1
            return NOTHING
        chain: list[BlockHash] = []
        added: list[BlockHash] = []
        before = blocks[hashes[0]][0] if first_block else None
        for own in hashes[: max(self.blocks_max - first_block, 0)]:
            known = blocks.get(own)
            if known is None:
                blocks[own] = before, computed_blocks
                added.append(own)
            elif known[0] != before:  # a hash names its whole prefix: no router makes such a chain
                break
            chain.append(own)
            before = own
        self._use(chain, computed_blocks)
        self.learned_count += len(added)
        removed = self._evict(self.blocks_max)
        if removed and added:  # a chain whose place was told wrongly may be longer than the whole
            evicted, new = set(removed), set(added)
            removed = [own for own in removed if own not in new]
            added = [own for own in added if own not in evicted]
        return Delta(removed, added)

    def _use(self, chain: Sequence[BlockHash], computed_blocks: float) -> None:
        """Make a chain the youngest, its last block first, and whatever is before it."""
        blocks = self._blocks
        for own in reversed(chain):
            blocks[own] = blocks[own][0], computed_blocks
            blocks.move_to_end(own)
        before = blocks[chain[0]][0] if chain else None
        while before is not None:
            own, before = before, blocks[before][0]
            blocks[own] = before, computed_blocks
            blocks.move_to_end(own)

    def expire(self, computed_blocks: float) -> Delta:
        """Forget what was used last when the engine had computed a whole KV$ less than this."""
        oldest = next(iter(self._blocks.values()), None)
        if oldest is None or computed_blocks - oldest[1] < max(self.blocks_max, 1):
            return NOTHING
        removed = []
        for own, (_, at) in self._blocks.items():
            if computed_blocks - at < self.blocks_max:
                break
            removed.append(own)
        for own in removed:
            del self._blocks[own]
        return Delta(removed)

    def trim(self, blocks_max: int) -> Delta:
        """Hold no more than this for now."""
        bound = max(0, blocks_max)
        if len(self._blocks) <= bound:
            return NOTHING
        return Delta(self._evict(bound))

    def clear(self) -> Delta:
        """The engine has dropped its cache."""
        return self.trim(0)

    def _evict(self, blocks_max: int) -> list[BlockHash]:
        """The oldest, children before parents."""
        blocks = self._blocks
        return [blocks.popitem(last=False)[0] for _ in range(len(blocks) - blocks_max)]
