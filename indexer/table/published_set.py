"""Which canonical hashes an engine's blocks publish, each counted once per block; pure.

A block is published while it and all its ancestors are shown to be there, so the published hashes
are prefix-closed at every moment. Beside blocks there are *credits*: hashes published on evidence,
without a block that has a name here; each stands behind a published hash or begins a chain.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Final

from indexer.contract.identifiers import BlockHash
from indexer.table.changes import NOTHING, Delta
from indexer.table.engine_block import EngineBlock
from indexer.table.residency import Residency

CREDITS_MAX: Final = 1 << 16
"""Credits of one engine: a million tokens in canonical blocks of 16."""


class PublishedSet:
    """Published hashes of one engine, and what has changed since the last delta.

    Attributes:
        held: published hash -> how many hold it: blocks, and a credit. A hash is entered while the
            one before it in its chain is there, and leaves before that one; hence parents stand
            before children.
        added: hashes published since the last delta, in order.
        removed: hashes taken back since the last delta, in order.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.held: dict[BlockHash, int] = {}
        self.added: list[BlockHash] = []
        self.removed: list[BlockHash] = []
        self._credits: dict[BlockHash, BlockHash | None] = {}  # -> the hash before it
        self._credits_behind: dict[BlockHash, set[BlockHash]] = {}

    def take(self) -> Delta:
        """What has changed since the last call."""
        if not self.added and not self.removed:
            return NOTHING
        delta = Delta(self.removed, self.added)
        self.added, self.removed = [], []
        return delta

    def clear(self) -> None:
        """Take everything back; the caller marks the blocks."""
        self.removed.extend(reversed(self.held))
        self.held.clear()
        self._credits.clear()
        self._credits_behind.clear()

    # -- blocks -----------------------------------------------------------------------------------

    def may_publish(self, block: EngineBlock) -> bool:
        """Whether a block that is not published yet can be."""
        return (
            block.hashes is not None
            and (block.parent is None or block.parent.published_at > 0)
            and self._residency.is_shown(block)
        )

    def publish(self, block: EngineBlock, mark: int) -> None:
        """Publish a block and whatever behind it has only waited for it."""
        held, is_shown = self.held, self._residency.is_shown
        stack = [block]
        while stack:
            block = stack.pop()
            block.published_at = mark
            for own in block.canonical():
                if own in held:
                    held[own] += 1
                else:
                    held[own] = 1
                    self.added.append(own)
            child = block.child
            while child is not None:
                if is_shown(child):
                    stack.append(child)
                child = child.after

    def withdraw(self, block: EngineBlock) -> None:
        """Take a published block and everything published behind it back."""
        withdrawn, stack = [], [block]
        while stack:
            block = stack.pop()
            block.published_at = 0
            withdrawn.append(block)
            if block.child is not None:
                stack.extend(child for child in block.children() if child.published_at)
        for block in reversed(withdrawn):
            for own in reversed(block.canonical()):
                self._release(own)

    def _release(self, own: BlockHash) -> None:
        """A block that holds this hash is withdrawn."""
        left = self.held[own] - 1
        if left == 0:
            if self._credits:
                self.end_credits(self._credits_behind.get(own, ()))
            del self.held[own]
            self.removed.append(own)
            return
        self.held[own] = left
        if left == 1 and own in self._credits:
            self.end_credits([own])

    def trim(self, blocks: Collection[EngineBlock], blocks_max: int) -> list[EngineBlock]:
        """Withdraw blocks until no more than `blocks_max` hashes are published.

        Chains go one after the other, each from its end up to where another published one branches
        off, that first whose end was published longest ago. Returns the blocks in that order.
        """
        behind = Counter(block.parent for block in blocks if block.published_at)
        ends = [block for block in blocks if block.published_at and block not in behind]
        ends.sort(key=attrgetter("published_at"))
        withdrawn = []
        for end in ends:
            block: EngineBlock | None = end
            while block is not None and block not in behind and len(self.held) > blocks_max:
                block.published_at = 0
                for own in reversed(block.canonical()):
                    self._release(own)
                withdrawn.append(block)
                block = block.parent
                behind[block] -= 1
                if behind[block] == 0:
                    del behind[block]
        return withdrawn

    # -- credits ----------------------------------------------------------------------------------

    @property
    def credits_count(self) -> int:
        """Credits there are."""
        return len(self._credits)

    def credit(self, hashes: Sequence[BlockHash]) -> int:
        """Publish what of this chain is not published, as credits; returns how many."""
        before: BlockHash | None = None
        credited_count = 0
        for own in hashes:
            if own not in self.held:
                if len(self._credits) >= CREDITS_MAX:
                    break
                self._credits[own] = before
                if before is not None:
                    self._credits_behind.setdefault(before, set()).add(own)
                self.held[own] = 1
                self.added.append(own)
                credited_count += 1
            before = own
        return credited_count

    def end_credits_behind(self, before: BlockHash) -> None:
        """End every credit behind a hash."""
        self.end_credits(self._credits_behind.get(before, ()))

    def end_all_credits(self) -> None:
        """End every credit."""
        self.end_credits(self._credits)

    def end_credits(self, hashes: Iterable[BlockHash]) -> None:
        """End the credits of these hashes, parents before children, and all credits behind them."""
        ended, stack = [], [*hashes][::-1]
        while stack:
            own = stack.pop()
            if own in self._credits:
                ended.append(own)
                stack.extend(self._credits_behind.get(own, ()))
                self._drop(own)
        for own in reversed(ended):
            left = self.held[own] - 1
            if left:
                self.held[own] = left
            else:
                del self.held[own]
                self.removed.append(own)

    def _drop(self, own: BlockHash) -> None:
        before = self._credits.pop(own)
        if before is not None:
            siblings = self._credits_behind[before]
            siblings.discard(own)
            if not siblings:
                del self._credits_behind[before]
