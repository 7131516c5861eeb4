"""The blocks of one engine as its events tell them: from its own names to canonical hashes; pure.

The engine's blocks form trees by their parents. A block is resident while its store count is above
zero in every group that decides a hit; it is published while it and all its ancestors are resident
and none of them is set aside, so the published canonical hashes are prefix-closed at every moment.
A block that was evicted under resident descendants stays in the tree as a hole; when it comes back
they are published again. Blocks whose parent is unknown wait, unplaced, until the parent is
announced.

A block that is set aside (see `residency`) is confirmed, with all its ancestors, as soon as the
engine stores it or something behind it: an engine evicts the ends of chains first, and the request
that stores a block holds every block before it.

The block sizes of engine and fleet may differ: every block carries the canonical hashes that end
within it, so a canonical block is credited when the last engine block it touches is published.
"""

from typing import Final, assert_never

from indexer.contract import block_hash
from indexer.contract.block_hash import TOKEN_BYTES
from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.engine.vllm_events import (
    DEVICE_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)
from indexer.table.changes import NOTHING, Delta
from indexer.table.engine_block import UNKNOWN, EngineBlock, Rest
from indexer.table.published_set import PublishedSet
from indexer.table.recent_removals import RecentRemovals
from indexer.table.residency import Residency

BLOCKS_MAX: Final = 1 << 22
"""Blocks of one engine, about 1.3 GB here; a larger cache wants a larger engine block size."""

UNPLACED_BLOCKS_MAX: Final = 1 << 16
"""Blocks that wait for an unknown parent, with their token ids."""


class BlockTree:
    """Engine blocks of one rank and the canonical hashes they hold.

    Attributes:
        mark: events applied so far.
        stored_count: block stores applied.
        removed_count: block removals applied.
        unknown_parents_count: stores that have to wait for their parent.
        unknown_removals_count: removals of blocks not known here.
        refused_count: blocks not taken: without tokens, or a bound is reached.
        confirmed_count: blocks set aside that were shown to be there.
    """

    def __init__(self, *, model_scope: str, block_size_tokens: int) -> None:
        self._model_scope = model_scope
        self._block_size_tokens = block_size_tokens
        self._stride = block_size_tokens * TOKEN_BYTES
        self._blocks: dict[EngineBlockHash, EngineBlock] = {}
        self._unplaced_count = 0
        self._residency = Residency()
        self._published_set = PublishedSet(self._residency)
        self._recent_removals = RecentRemovals()
        self.mark = 0
        self.stored_count = 0
        self.removed_count = 0
        self.unknown_parents_count = 0
        self.unknown_removals_count = 0
        self.refused_count = 0
        self.confirmed_count = 0

    def __len__(self) -> int:
        """Blocks known: resident ones, holes and waiting ones."""
        return len(self._blocks)

    def known(self, key: EngineBlockHash) -> EngineBlock | None:
        """A block by the engine's name of it, if it is known here."""
        return self._blocks.get(key)

    def apply(self, event: Event) -> Delta:
        """Apply one event; events come in the engine's order."""
        self.mark += 1
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self._forget_all()
            case _:
                assert_never(event)
        if self._published_set.added or self._published_set.removed:
            return self._published_set.take()
        return NOTHING

    def _forget_all(self) -> None:
        self._blocks.clear()
        self._unplaced_count = 0
        self._residency.clear()
        self._published_set.clear()
        self._recent_removals.void(self.mark)

    # -- stores -----------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        residency = self._residency
        if event.medium != DEVICE_MEDIUM:
            self.refused_count += residency.store_elsewhere(event)
            return
        if not event.hashes:
            return
        if not event.decides:
            residency.note_partial(event.group)
            return
        if event.group not in residency.groups and not self._begin_group(event.group):
            self.refused_count += len(event.hashes)
            return
        parent = None if event.parent is None else self._blocks.get(event.parent)
        if not self._has_room(event, parent):
            self.refused_count += len(event.hashes)
            return
        if parent is not None:
            if parent.published_at:
                parent.published_at = self.mark
            if residency.doubted or residency.withheld:
                self._confirm(parent, event.group)
        elif event.parent is not None:
            self.unknown_parents_count += 1
            parent = self._blocks[event.parent] = EngineBlock(event.parent, None)
        self.stored_count += len(event.hashes)
        self._store_chain(event, parent)

    def _store_chain(self, event: BlockStored, parent: EngineBlock | None) -> None:
        """Walk the event's blocks from the parent down."""
        last = self._root(event) if parent is None else parent.last()
        size, extra_keys = event.block_size_tokens * TOKEN_BYTES, event.extra_keys
        done = 0
        is_plain = size == self._stride and extra_keys is None
        if is_plain and last and len(self._residency.groups) == 1:
            done, parent = self._append(event, parent, last)
            last = parent.last() if parent is not None else last
        for i in range(done, len(event.hashes)):
            key = event.hashes[i]
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = EngineBlock(key, parent)
            elif block.is_expected and not block.adopt(parent):
                self.refused_count += len(event.hashes) - i
                return
            if block.is_expected:
                own = event.tokens[i * size : (i + 1) * size]
                block.rest = Rest(UNKNOWN, own, extra_keys[i] if extra_keys else ())
                self._unplaced_count += 1
                if parent is None:
                    assert last is not None, key
                    self._place(block, Rest(last, b"", ()))
                elif parent.hashes is not None:
                    self._place(block, parent.behind())
            self._count(block, event.group)
            parent = block

    def _append(
        self, event: BlockStored, parent: EngineBlock | None, last: BlockHash
    ) -> tuple[int, EngineBlock | None]:
        """New blocks of the canonical size behind a placed one: nearly all blocks come this way.

        Without a call per block, because that would be most of the cost.
        Returns how many there were before the first known one, and the last of them.
        """
        blocks, held, added = self._blocks, self._published_set.held, self._published_set.added
        published_at = self.mark if parent is None or parent.published_at else 0
        done = 0
        hashes = block_hash.split(block_hash.chain(last, event.tokens, self._stride // TOKEN_BYTES))
        for key, own in zip(event.hashes, hashes, strict=True):
            if key in blocks:
                break
            blocks[key] = parent = EngineBlock(key, parent)
            parent.hashes = own
            parent.count = 1
            done += 1
            if published_at:
                parent.published_at = published_at
                if own in held:
                    held[own] += 1
                else:
                    held[own] = 1
                    added.append(own)
        return done, parent

    def _count(self, block: EngineBlock, group: int) -> None:
        """One copy more of a block that has its place in the tree."""
        residency = self._residency
        is_first = residency.is_doubted(block.key, group)  # an earlier copy is not provable
        copies = residency.copies(group)
        if copies is None:
            block.count = 1 if is_first else block.count + 1
        else:
            copies[block.key] = 1 if is_first else copies.get(block.key, 0) + 1
        if residency.has_set_aside:
            self._confirm(block, group)
        if block.published_at:
            block.published_at = self.mark
        elif self._published_set.may_publish(block):
            self._published_set.publish(block, self.mark)

    def _confirm(self, block: EngineBlock | None, group: int) -> None:
        """The engine shows a block to be in a group, hence all its ancestors."""
        residency = self._residency
        confirmed = []
        while block is not None:
            was_aside = residency.is_aside(block.key)
            if not residency.prove(block.key, group):
                break
            if was_aside and not residency.is_aside(block.key):
                confirmed.append(block)
            block = block.parent
        self._reveal(confirmed)

    def _reveal(self, confirmed: list[EngineBlock]) -> None:
        """Publish blocks that are set aside no more; given from the last one up."""
        self.confirmed_count += len(confirmed)
        for block in reversed(confirmed):
            if not block.published_at and self._published_set.may_publish(block):
                self._published_set.publish(block, self.mark)

    def _has_room(self, event: BlockStored, parent: EngineBlock | None) -> bool:
        if not event.tokens or len(self._blocks) + len(event.hashes) >= BLOCKS_MAX:
            return False
        waits = event.parent is not None and (parent is None or parent.hashes is None)
        return not waits or self._unplaced_count + len(event.hashes) <= UNPLACED_BLOCKS_MAX

    def _root(self, event: BlockStored) -> BlockHash:
        return block_hash.root(
            model_scope=self._model_scope,
            block_size_tokens=self._block_size_tokens,
            adapter=event.adapter,
            salt=event.salt,
        )

    def _place(self, block: EngineBlock, before: Rest) -> None:
        """Place a block where the chain stands at `before`, and all that waited for it."""
        stack = [(block, before)]
        while stack:
            block, before = stack.pop()
            block.place(before, self._stride)
            self._unplaced_count -= 1
            if block.child is not None:
                behind = block.behind()
                stack.extend((child, behind) for child in block.children())

    def _begin_group(self, group: int) -> bool:
        """A further deciding group: from now on a block has to be resident in it as well."""
        if not self._residency.begin_group(group):
            return False
        for block in self._blocks.values():
            if block.parent is None and block.published_at:
                self._published_set.withdraw(block)
        return True

    # -- removals ---------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        residency = self._residency
        if event.medium != DEVICE_MEDIUM:
            removed_count = residency.remove_elsewhere(event)
            self.removed_count += removed_count
            self.unknown_removals_count += len(event.hashes) - removed_count
            return
        if event.group in residency.partial_groups:
            return
        copies = residency.copies(event.group) if event.group in residency.groups else {}
        for key in event.hashes:
            block = self._blocks.get(key)
            if copies is not None:
                count = copies.get(key, 0)
            else:
                count = 0 if block is None else block.count
            if count == 0:
                self.unknown_removals_count += 1
                self._contradict(block)
                continue
            self.removed_count += 1
            if copies is None:
                assert block is not None, key
                block.count = count - 1
            elif count > 1:
                copies[key] = count - 1
            else:
                del copies[key]
            if count == 1 and block is not None:
                if block.published_at:
                    self._published_set.withdraw(block)
                self._contradict(block)
                self._forget(block)

    def _contradict(self, block: EngineBlock | None) -> None:
        """No copy is left of a block in some group, or of an unknown block: evidence of it ends."""
        published_set = self._published_set
        if block is None or not self._recent_removals.note(self.mark, block):
            self._recent_removals.void(self.mark)
            published_set.end_all_credits()
        elif published_set.credits_count:
            published_set.end_credits(block.canonical())
            if block.rest is not None:
                published_set.end_credits_behind(block.rest.last)

    def _forget(self, block: EngineBlock | None) -> None:
        """Drop a block nobody needs any more, and then its ancestors likewise."""
        residency = self._residency
        while block is not None and block.child is None and not residency.has_copies(block):
            block.unlink()
            del self._blocks[block.key]
            if residency.doubted or residency.withheld:
                residency.forget(block.key)
            if block.hashes is None and block.is_unplaced:
                self._unplaced_count -= 1
            block = block.parent
