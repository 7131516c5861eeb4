"""What one engine holds, from its events and from what is known beside them; pure.

Beside the events (`block_tree`) there are losses of history, a bound on what is published, evidence
that blocks are there although no event told so, and checkpoints.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Final, Self

from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.engine.vllm_events import AllBlocksCleared
from indexer.table import table_dump
from indexer.table.block_tree import BlockTree
from indexer.table.changes import Delta
from indexer.table.published_set import PublishedSet

WITHHELD_LOOKED_AT_MAX: Final = 1024
"""Looked through in under a millisecond, ten times a second at most."""


class BlockTable(BlockTree):
    """Engine blocks of one rank, those set aside among them, and the canonical hashes published.

    Attributes:
        credited_count: canonical hashes credited on evidence.
        trimmed_count: blocks withheld by `trim`.
    """

    def __init__(self, *, model_scope: str, block_size_tokens: int) -> None:
        super().__init__(model_scope=model_scope, block_size_tokens=block_size_tokens)
        # canonical hash -> the block set aside that ends with it; None when that is ambiguous
        self._names: dict[BlockHash, EngineBlockHash | None] | None = None
        self.credited_count = 0
        self.trimmed_count = 0

    @property
    def published_count(self) -> int:
        """Distinct canonical hashes published."""
        return len(self._published_set.held)

    @property
    def unplaced_count(self) -> int:
        """Blocks that wait for an unknown ancestor."""
        return self._unplaced_count

    @property
    def set_aside_count(self) -> int:
        """Blocks known by name and place that are not published until they are confirmed."""
        return self._residency.set_aside_count

    @property
    def withheld_count(self) -> int:
        """Of the blocks set aside those that `trim` set aside: there, but not published."""
        return len(self._residency.withheld)

    @property
    def credits_count(self) -> int:
        """Canonical hashes published on evidence alone, without a block that has a name here."""
        return self._published_set.credits_count

    def holds(self, block: BlockHash) -> bool:
        """Whether a canonical hash is published."""
        return block in self._published_set.held

    def stored(self, blocks: Sequence[BlockHash]) -> list[BlockHash]:
        """Which canonical hashes are of blocks that the engine evidently has.

        Those published, and the WITHHELD_LOOKED_AT_MAX withheld last: a block that is new was shown
        by the engine just now, so it is published unless the index has no room for it.
        """
        held, withheld = self._published_set.held, self._residency.withheld
        if not withheld or all(block in held for block in blocks):
            return [block for block in blocks if block in held]
        newest = islice(reversed(withheld), WITHHELD_LOOKED_AT_MAX)
        aside = {own for key in newest for own in self._blocks[key].canonical()}
        return [block for block in blocks if block in held or block in aside]

    def published(self) -> list[BlockHash]:
        """Every published canonical hash once, parents before children."""
        return list(self._published_set.held)

    def clear(self) -> Delta:
        """Forget every block: the engine dropped them, or is another one."""
        return self.apply(AllBlocksCleared())

    def doubt(self) -> Delta:
        """History was lost: any block may have gone unnoticed, and others may have come.

        Every block is set aside with the least count that is provable, one copy: a removal ends
        it. Credits are dropped. What the engine shows afterwards to be there is confirmed.
        """
        self.mark += 1
        self._recent_removals.void(self.mark)
        self._published_set.clear()
        for block in self._blocks.values():
            block.published_at = 0
        self._residency.doubt(self._blocks.values())
        self._names = None
        return self._published_set.take()

    def trim(self, blocks_max: int) -> Delta:
        """Publish no more than this: when it is exceeded, withhold chains down to 7/8 of it.

        Credits go first, then whole chains, tails first, those first whose last store or
        confirmation is oldest. Counts are kept, so nothing is lost: a withheld block comes back
        when it is confirmed, and by `readmit`. Costs nothing while the bound is kept.

        Args:
            blocks_max: canonical hashes that may be published.
        """
        published_set = self._published_set
        if len(published_set.held) > blocks_max:
            published_set.end_all_credits()
            withdrawn = published_set.trim(self._blocks.values(), _goal(blocks_max))
            self._residency.withheld.update((block.key, None) for block in withdrawn)
            self.trimmed_count += len(withdrawn)
            self._names = None
        return published_set.take()

    def readmit(self, blocks_max: int) -> Delta:
        """Publish withheld blocks again, those withheld last first, up to 7/8 of the bound.

        Doubted blocks stay set aside. Costs nothing when none is withheld or there is no room.

        Args:
            blocks_max: canonical hashes that may be published, as for `trim`.
        """
        published_set, withheld = self._published_set, self._residency.withheld
        goal = _goal(blocks_max)
        while withheld and len(published_set.held) < goal:
            key, _ = withheld.popitem()
            block = self._blocks[key]
            if len(published_set.held) + len(block.canonical()) > goal:
                withheld[key] = None
                break
            if published_set.may_publish(block):
                published_set.publish(block, self.mark)
        return published_set.take()

    def credit(self, hashes: Sequence[BlockHash], *, since: int | None = None) -> Delta:
        """Evidence that this chain, from its root on, is resident on the device as a whole.

        Blocks set aside that end with these hashes are confirmed (an engine has one name for one
        content); hashes then not published become credits, at most CREDITS_MAX. Credits end all
        together when the engine removes a block of unknown content, clears, or history is lost;
        one by one, with all behind, when a block of the same content is removed.

        Args:
            hashes: canonical hashes, the first block's first.
            since: `mark` when the evidence was observed, or earlier: what events applied since
                contradict is left out. None: observed now.
        """
        since = self.mark if since is None else since
        hashes = self._recent_removals.uncontradicted(hashes, since)
        if self._residency.has_set_aside:
            self._show(hashes)
        self.credited_count += self._published_set.credit(hashes)
        return self._published_set.take()

    # -- checkpoint -------------------------------------------------------------------------------

    def dump(self) -> dict[str, object]:
        """Everything needed to go on elsewhere, as columns that msgpack packs fast; no credits."""
        scope = {"model_scope": self._model_scope, "block_size_tokens": self._block_size_tokens}
        return table_dump.dump(scope, self._blocks, self._residency, self.mark)

    @classmethod
    def load(cls, dump: object, *, model_scope: str, block_size_tokens: int) -> Self:
        """The table of a dump that went through msgpack; `published` tells what it publishes.

        Raises:
            MalformedCheckpoint: it is no dump of this version, or of another scope or block size.
        """
        scope = {"model_scope": model_scope, "block_size_tokens": block_size_tokens}
        loaded = table_dump.load(dump, scope)
        table = cls(model_scope=model_scope, block_size_tokens=block_size_tokens)
        table._blocks = loaded.blocks
        table._residency = loaded.residency
        table._published_set = PublishedSet(loaded.residency)
        table.mark = loaded.mark
        table._recent_removals.void(loaded.mark)
        for block in loaded.blocks.values():
            table._unplaced_count += block.is_unplaced
            if block.parent is None and table._published_set.may_publish(block):
                table._published_set.publish(block, 1)
        table._published_set.take()
        for block, published_at in zip(loaded.blocks.values(), loaded.published_at, strict=True):
            if block.published_at:
                block.published_at = max(published_at, 1)
        return table

    # -- evidence ---------------------------------------------------------------------------------

    def _show(self, hashes: Sequence[BlockHash]) -> None:
        """Confirm the blocks set aside that end with these hashes, with their ancestors."""
        if self._names is None:
            self._names = self._names_aside()
        for own in reversed(hashes):
            key = self._names.get(own)
            block = None if key is None else self._blocks.get(key)
            if own in self._published_set.held or block is None:
                continue
            confirmed = []
            while block is not None and self._residency.is_aside(block.key):
                self._residency.show(block.key)
                confirmed.append(block)
                block = block.parent
            self._reveal(confirmed)

    def _names_aside(self) -> dict[BlockHash, EngineBlockHash | None]:
        names: dict[BlockHash, EngineBlockHash | None] = {}
        for key in chain(self._residency.doubted, self._residency.withheld):
            last = self._blocks[key].last()
            if last:
                names[last] = key if names.get(last, key) == key else None
        return names


def _goal(blocks_max: int) -> int:
    """What trimming leaves: room for new blocks, so that not every one of them is trimmed for."""
    return blocks_max - blocks_max // 8
