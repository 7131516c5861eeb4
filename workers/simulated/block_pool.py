"""Paged block pool with reference counts and a prefix cache over full blocks. Pure.

A block is in use (reference count > 0) or free. A free block may still be resident: it keeps its
content, can be hit, and is evicted only when its place is needed. The same content may occupy
several blocks: two requests that compute it at the same time each keep their own, so a hash can
be stored twice and removed twice.
"""

from collections.abc import Callable, Sequence

from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.lru import LeastRecentlyUsed
from workers.simulated.kv_events import BlocksCleared, BlocksRemoved, KvEvent


class BlockPool:
    """Blocks 0 .. capacity_blocks - 1 of one instance.

    Attributes:
        capacity_blocks: number of blocks.
        events: what happened since the owner last took it; eviction and reset add to it here,
            the owner adds what it stored, which keeps engine order.
        order: which free block goes next; starts with all of them.
    """

    def __init__(
        self,
        capacity_blocks: int,
        order: EvictionOrder | None = None,
        demote: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Empty blocks that are evicted in this order.

        Args:
            capacity_blocks: number of blocks.
            order: None: least recently used first.
            demote: takes the hashes of blocks that were evicted, in order; None: nobody does.
        """
        self.capacity_blocks = capacity_blocks
        self.events: list[KvEvent] = []
        self._demote = demote
        self.order = LeastRecentlyUsed(capacity_blocks) if order is None else order
        self._references = [0] * capacity_blocks
        self._hash_of: list[int | None] = [None] * capacity_blocks
        self._first: dict[int, int] = {}  # hash -> the block a hit gets
        self._copies: dict[int, list[int]] = {}  # hash -> further blocks of the same content

    @property
    def free_count(self) -> int:
        """Blocks no request holds, resident ones included."""
        return len(self.order)

    @property
    def used_count(self) -> int:
        """Blocks held by requests."""
        return self.capacity_blocks - len(self.order)

    def match(self, hashes: Sequence[int], blocks_max: int) -> list[int]:
        """Resident blocks of the longest leading run of `hashes`, at most `blocks_max` of them."""
        first = self._first
        hit = []
        for block_hash in hashes[:blocks_max]:
            block_id = first.get(block_hash)
            if block_id is None:
                break
            hit.append(block_id)
        return hit

    def idle_count(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks are free, that is, would leave the free blocks when held."""
        references = self._references
        return sum(1 for block_id in block_ids if not references[block_id])

    def hold(self, block_ids: Sequence[int], category: Category | None = None) -> None:
        """A request of a category has hit these blocks and holds them; free ones are free no more.

        Add one reference to each.
        """
        if not block_ids:
            return
        references = self._references
        self.order.touch(block_ids, category)
        self.order.revive([block_id for block_id in block_ids if not references[block_id]])
        for block_id in block_ids:
            references[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, evicting what they held. The caller checked `free_count`."""
        assert count <= len(self.order), (count, len(self.order))
        references, hash_of = self._references, self._hash_of
        taken = self.order.take(count)
        removed = []
        for block_id in taken:
            block_hash = hash_of[block_id]
            if block_hash is not None:
                self._forget(block_id, block_hash)
                removed.append(block_hash)
            references[block_id] = 1
        if removed:
            self.events.append(BlocksRemoved(block_hashes=tuple(removed)))
            if self._demote is not None:
                self._demote(removed)
        return taken

    def store(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[int],
        category: Category | None = None,
    ) -> None:
        """Make full blocks, held by the caller and not yet resident, hittable by everybody."""
        first, hash_of = self._first, self._hash_of
        self.order.store(block_ids, hashes, category)
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            assert hash_of[block_id] is None, (block_id, hash_of[block_id])
            hash_of[block_id] = block_hash
            if first.setdefault(block_hash, block_id) != block_id:
                self._copies.setdefault(block_hash, []).append(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a chain, tail first, so that its tail goes first.

        Its last block may not be full yet and is then nobody's loss: it goes before all others.
        """
        references, hash_of = self._references, self._hash_of
        freed = []
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            assert references[block_id] >= 0, block_id
            if references[block_id]:
                continue
            if hash_of[block_id] is None:
                self.order.release_empty(block_id)
            else:
                freed.append(block_id)
        self.order.release(freed)

    def reset(self) -> bool:
        """Forget all content. False, and nothing happens, while any block is in use."""
        if self.used_count:
            return False
        self._hash_of = [None] * self.capacity_blocks
        self._first.clear()
        self._copies.clear()
        self.order.clear()
        self.events.append(BlocksCleared())
        return True

    def _forget(self, block_id: int, block_hash: int) -> None:
        self._hash_of[block_id] = None
        copies = self._copies.get(block_hash)
        if self._first[block_hash] == block_id:
            if copies:
                self._first[block_hash] = copies.pop(0)
            else:
                del self._first[block_hash]
        else:
            assert copies, block_hash
            copies.remove(block_id)
        if copies is not None and not copies:
            del self._copies[block_hash]
