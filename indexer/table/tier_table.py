"""What a tier of KV$ behind an engine's device holds, as the engine's events tell; pure.

Events of a medium that an engine can load from (`CPU`, `STORAGE`, ...) make up a table like the
device's, with the same laws: published hashes are prefix-closed, history that is lost doubts every
block. They are published under names of their own (`block_hash.tier_name`), beside the device's.

Two things differ. Some emitters tell no tokens: their blocks are taken where the device's table
knows a block of that name, so those that are told after the device has dropped them are refused.
And some never tell that a block is gone: what is more than the tier is said to hold is forgotten,
those first that were written longest ago, chains from their tails.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.engine.vllm_events import (
    DEVICE_MEDIUM,
    AllBlocksCleared,
    BlockStored,
    Event,
)
from indexer.table.block_table import BlockTable
from indexer.table.block_tree import BLOCKS_MAX, BlockTree
from indexer.table.changes import NOTHING, Delta
from indexer.table.engine_block import EngineBlock

TIER_BLOCKS_MAX: Final = 1 << 20
"""Canonical blocks of a tier whose size nobody tells: 16 M tokens."""


DOUBTED_RATIO_MAX: Final = 2
"""Blocks known over those it may hold, from which on a loss of history clears it."""


class TierTable:
    """Blocks that an engine can load.

    Attributes:
        forgotten_count: blocks forgotten for being more than the tier holds.
    """

    def __init__(
        self,
        *,
        model_scope: str,
        block_size_tokens: int,
        media: Iterable[str],
        blocks_max: int = TIER_BLOCKS_MAX,
    ) -> None:
        """An empty tier.

        Args:
            model_scope: of the fleet.
            block_size_tokens: canonical.
            media: as events name them, `REMOTE ` before those of another machine.
            blocks_max: canonical blocks it holds.
        """
        self._table = _Table(model_scope=model_scope, block_size_tokens=block_size_tokens)
        self._media = frozenset(media)
        self._blocks_max = blocks_max
        self.forgotten_count = 0

    def __len__(self) -> int:
        """Canonical blocks published."""
        return self._table.published_count

    @property
    def refused_count(self) -> int:
        """Blocks not taken: of unknown content, or a bound is reached."""
        return self._table.refused_count

    def published(self) -> list[BlockHash]:
        """Names of all blocks published, parents before children."""
        return [block_hash.tier_name(own) for own in self._table.published()]

    def hear(self, event: Event, device: BlockTree) -> list[Delta]:
        """Apply an event, of whatever medium; the device's table has applied it already."""
        if isinstance(event, AllBlocksCleared):
            return [_named(self._table.apply(event))]  # whether the tier is meant nobody tells
        if event.medium not in self._media:
            return []
        if isinstance(event, BlockStored) and not event.tokens:
            delta = self._table.take_known(event.hashes, device, event.group)
        else:
            delta = self._table.apply(replace(event, medium=DEVICE_MEDIUM))
        return [_named(delta), self.fit(self._blocks_max)]

    def fit(self, blocks_max: int) -> Delta:
        """Forget what is more than so many canonical blocks, an eighth at least."""
        withdrawn, count = self._table.forget_oldest(min(blocks_max, self._blocks_max))
        self.forgotten_count += count
        return _named(withdrawn)

    def doubt(self) -> Delta:
        """History was lost; see `BlockTable.doubt`. What waits to be confirmed is bounded, too."""
        is_much = len(self._table) > DOUBTED_RATIO_MAX * self._blocks_max
        return self.clear() if is_much else _named(self._table.doubt())

    def clear(self) -> Delta:
        """Nothing is held any more."""
        return _named(self._table.clear())


class _Table(BlockTable):
    """A block table that takes what another one knows, and forgets what it withholds."""

    def take_known(self, keys: Iterable[EngineBlockHash], device: BlockTree, group: int) -> Delta:
        """One copy more of blocks that the device's table knows by name; others are refused."""
        self.mark += 1
        residency = self._residency
        if group not in residency.groups and not self._begin_group(group):
            return NOTHING
        for key in keys:
            block = self._blocks.get(key) or self._copied(device.known(key))
            if block is None or block.hashes is None:
                self.refused_count += 1
                continue
            self.stored_count += 1
            self._count(block, group)
        return self._published_set.take()

    def _copied(self, known: EngineBlock | None) -> EngineBlock | None:
        """A block of the other table and its ancestors, at their places here; None for none."""
        if known is None or known.hashes is None:
            return None
        lacking = []
        block: EngineBlock | None = known
        while block is not None and block.key not in self._blocks:
            lacking.append(block)
            block = block.parent
        parent = None if block is None else self._blocks[block.key]
        placed = parent is None or parent.hashes is not None
        if not placed or len(self._blocks) + len(lacking) > BLOCKS_MAX:
            return None
        for one in reversed(lacking):
            parent = self._blocks[one.key] = EngineBlock(one.key, parent)
            parent.hashes, parent.rest = one.hashes, one.rest
        return parent

    def forget_oldest(self, blocks_max: int) -> tuple[Delta, int]:
        """Drop what `trim` withholds; returns what that takes back, and how many blocks."""
        delta = self.trim(blocks_max)
        withheld = list(self._residency.withheld)
        for key in withheld:
            block = self._blocks.get(key)
            if block is None:
                continue
            block.count = 0
            for group in self._residency.groups[1:]:
                self._residency.places.get((DEVICE_MEDIUM, group), {}).pop(key, None)
            self._forget(block)
        self._residency.withheld.clear()
        return delta, len(withheld)


def _named(delta: Delta) -> Delta:
    if delta is NOTHING:
        return NOTHING
    name = block_hash.tier_name
    return Delta([name(own) for own in delta.removed], [name(own) for own in delta.added])
