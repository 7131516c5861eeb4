"""What one engine (one data-parallel rank) holds: from its own block names to canonical hashes.

The engine's blocks form trees by their parents. A block is resident while its store count is above
zero in every group that decides a hit; it is published while it and all its ancestors are resident,
so the published canonical hashes are prefix-closed at every moment. A block that was evicted under
resident descendants stays in the table as a hole; when it comes back they are published again.
Blocks whose parent is unknown wait, unplaced, until the parent is announced.

The block sizes of engine and fleet may differ: every block carries the canonical hashes that end
within it, so a canonical block is credited when the last engine block it touches is published.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from indexer.contract import block_hash
from indexer.contract.block_hash import TOKEN_BYTES
from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.engine_block import UNKNOWN, EngineBlock, Rest
from indexer.vllm_events import DEVICE_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored, Event

BLOCKS_MAX: Final = 1 << 22
"""Blocks of one engine, about 1.3 GB here; a larger cache wants a larger engine block size."""

UNPLACED_BLOCKS_MAX: Final = 1 << 16
"""Blocks that wait for an unknown parent, with their token ids."""

ELSEWHERE_BLOCKS_MAX: Final = 1 << 20
"""Blocks on media that credit nothing; some emitters never announce their removal."""

GROUPS_MAX: Final = 16
"""Deciding groups of one engine; more are taken for foreign messages."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event changes in the index, net of what other blocks still hold.

    Attributes:
        removed: canonical hashes no longer held, children before parents; to be taken back first.
        added: canonical hashes held from now on, parents before children.
    """

    removed: Sequence[BlockHash] = ()
    added: Sequence[BlockHash] = ()


class BlockTable:
    """Engine blocks of one rank and the canonical hashes they hold; pure.

    Attributes:
        stored_count: block stores applied.
        removed_count: block removals applied.
        unknown_parents_count: stores that have to wait for their parent.
        unknown_removals_count: removals of blocks not known here.
        refused_count: blocks not taken: without tokens, or a bound of the table is reached.
    """

    def __init__(self, *, model_scope: str, block_size_tokens: int) -> None:
        self._model_scope = model_scope
        self._block_size_tokens = block_size_tokens
        self._stride = block_size_tokens * TOKEN_BYTES
        self._blocks: dict[EngineBlockHash, EngineBlock] = {}
        self._held: dict[BlockHash, int] = {}  # published canonical hash -> blocks that hold it
        self._groups: list[int] = []  # deciding groups seen on the device
        # (medium, group) -> copies; all but the first deciding group, which counts in its blocks.
        self._copies: dict[tuple[str, int], dict[EngineBlockHash, int]] = {}
        self._unplaced_count = 0
        self._added: list[BlockHash] = []
        self._removed: list[BlockHash] = []
        self.stored_count = 0
        self.removed_count = 0
        self.unknown_parents_count = 0
        self.unknown_removals_count = 0
        self.refused_count = 0

    def __len__(self) -> int:
        """Blocks known: resident ones, holes and waiting ones."""
        return len(self._blocks)

    @property
    def published_count(self) -> int:
        """Distinct canonical hashes published."""
        return len(self._held)

    @property
    def unplaced_count(self) -> int:
        """Blocks that wait for an unknown ancestor."""
        return self._unplaced_count

    def apply(self, event: Event) -> Delta:
        """Apply one event; events come in the engine's order."""
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                return self.clear()
        if not self._added and not self._removed:
            return Delta()
        delta = Delta(self._removed, self._added)
        self._added, self._removed = [], []
        return delta

    def clear(self) -> Delta:
        """Forget every block: the engine dropped them, or what it holds is not known any more."""
        removed = self.published()
        removed.reverse()
        self._blocks.clear()
        self._held.clear()
        self._copies.clear()
        self._unplaced_count = 0
        return Delta(removed)

    def published(self) -> list[BlockHash]:
        """Every published canonical hash once, parents before children."""
        hashes: dict[BlockHash, None] = {}
        stack = [b for b in self._blocks.values() if b.parent is None and b.published]
        while stack:
            block = stack.pop()
            hashes.update(dict.fromkeys(block.canonical()))
            stack.extend(child for child in block.children() if child.published)
        return list(hashes)

    # -- stores -----------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        if event.medium != DEVICE_MEDIUM:
            self._store_elsewhere(event)
            return
        if not event.hashes or not event.decides or not self._knows_group(event.group):
            return
        parent = None if event.parent is None else self._blocks.get(event.parent)
        if not self._has_room(event, parent):
            self.refused_count += len(event.hashes)
            return
        if parent is None and event.parent is not None:
            self.unknown_parents_count += 1
            parent = self._blocks[event.parent] = EngineBlock(event.parent, None)
        self.stored_count += len(event.hashes)
        if event.group == self._groups[0]:
            self._store_chain(event, parent, None)
        else:
            copies = self._copies.setdefault((DEVICE_MEDIUM, event.group), {})
            self._store_chain(event, parent, copies)

    def _store_chain(
        self,
        event: BlockStored,
        parent: EngineBlock | None,
        copies: dict[EngineBlockHash, int] | None,
    ) -> None:
        """Walk the event's blocks from the parent down; copies None: the first deciding group."""
        last = self._root(event) if parent is None else parent.last()
        size, extra_keys = event.block_size_tokens * TOKEN_BYTES, event.extra_keys
        done = 0
        if len(self._groups) == 1 and size == self._stride and extra_keys is None and last:
            done, parent = self._append(event, parent, last)
            last = parent.last() if parent is not None else last
        for i in range(done, len(event.hashes)):
            key = event.hashes[i]
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = EngineBlock(key, parent)
            elif block.is_expected and not _adopt(block, parent):
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
            if copies is None:
                block.count += 1
            else:
                copies[key] = copies.get(key, 0) + 1
            if not block.published and self._may_publish(block):
                self._publish(block)
            parent = block

    def _append(
        self, event: BlockStored, parent: EngineBlock | None, last: BlockHash
    ) -> tuple[int, EngineBlock | None]:
        """New blocks of the canonical size behind a placed one: nearly all blocks come this way.

        Without a call per block, because that would be most of the cost.
        Returns how many there were before the first known one, and the last of them.
        """
        blocks, held, added = self._blocks, self._held, self._added
        publishes = parent is None or parent.published
        done = 0
        hashes = block_hash.split(block_hash.chain(last, event.tokens, self._stride // TOKEN_BYTES))
        for key, own in zip(event.hashes, hashes, strict=True):
            if key in blocks:
                break
            blocks[key] = parent = EngineBlock(key, parent)
            parent.hashes = own
            parent.count = 1
            done += 1
            if publishes:
                parent.published = True
                if own in held:
                    held[own] += 1
                else:
                    held[own] = 1
                    added.append(own)
        return done, parent

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

    def _store_elsewhere(self, event: BlockStored) -> None:
        copies = self._copies.setdefault((event.medium, event.group), {})
        for key in event.hashes:
            if key not in copies and len(copies) >= ELSEWHERE_BLOCKS_MAX:
                self.refused_count += 1
            else:
                copies[key] = copies.get(key, 0) + 1

    def _knows_group(self, group: int) -> bool:
        """Take note of a deciding group; from now on a block has to be resident in it as well."""
        if group in self._groups:
            return True
        if len(self._groups) >= GROUPS_MAX:
            return False
        self._groups.append(group)
        for block in self._blocks.values():
            if block.parent is None and block.published:
                self._withdraw(block)
        return True

    # -- removals ---------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        on_device = event.medium == DEVICE_MEDIUM
        first = on_device and event.group in self._groups[:1]
        copies = self._copies.get((event.medium, event.group), {})
        for key in event.hashes:
            block = self._blocks.get(key)
            count = copies.get(key, 0) if not first else 0 if block is None else block.count
            if count == 0:
                self.unknown_removals_count += 1
                continue
            self.removed_count += 1
            if first:
                assert block is not None, key
                block.count = count - 1
            elif count > 1:
                copies[key] = count - 1
            else:
                del copies[key]
            if count == 1 and on_device and block is not None:
                if block.published:
                    self._withdraw(block)
                self._forget(block)

    def _forget(self, block: EngineBlock | None) -> None:
        """Drop a block nobody needs any more, and then its ancestors likewise."""
        while block is not None and block.child is None and not self._has_copies(block):
            block.unlink()
            del self._blocks[block.key]
            if block.rest is not None and block.rest.last == UNKNOWN:
                self._unplaced_count -= 1
            block = block.parent

    # -- residency --------------------------------------------------------------------------------

    def _has_copies(self, block: EngineBlock) -> bool:
        return block.count > 0 or any(
            block.key in self._copies.get((DEVICE_MEDIUM, group), ()) for group in self._groups[1:]
        )

    def _is_resident(self, block: EngineBlock) -> bool:
        return block.count > 0 and all(
            block.key in self._copies.get((DEVICE_MEDIUM, group), ()) for group in self._groups[1:]
        )

    def _may_publish(self, block: EngineBlock) -> bool:
        return (
            block.hashes is not None
            and (block.parent is None or block.parent.published)
            and self._is_resident(block)
        )

    def _publish(self, block: EngineBlock) -> None:
        """Publish a block and whatever below it has only waited for it."""
        stack = [block]
        while stack:
            block = stack.pop()
            block.published = True
            for held in block.canonical():
                count = self._held.get(held, 0)
                self._held[held] = count + 1
                if count == 0:
                    self._added.append(held)
            if block.child is not None:
                stack.extend(child for child in block.children() if self._is_resident(child))

    def _withdraw(self, block: EngineBlock) -> None:
        """Take a published block and everything published below it back."""
        withdrawn, stack = [], [block]
        while stack:
            block = stack.pop()
            block.published = False
            withdrawn.append(block)
            if block.child is not None:
                stack.extend(child for child in block.children() if child.published)
        for block in reversed(withdrawn):
            for held in reversed(block.canonical()):
                count = self._held[held]
                if count == 1:
                    del self._held[held]
                    self._removed.append(held)
                else:
                    self._held[held] = count - 1


def _adopt(block: EngineBlock, parent: EngineBlock | None) -> bool:
    """Give a block that was only expected its parent; False when it is above that parent itself."""
    ancestor = parent
    while ancestor is not None and ancestor.hashes is None:
        if ancestor is block:
            return False
        ancestor = ancestor.parent
    if parent is not None:
        block.link(parent)
    return True
