"""vLLM's block pool with another order of its free blocks; imported inside vLLM 0.32.0 only.

What is stored, hit and evicted goes through vLLM's own methods, with their events: only which free
block comes next is decided here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from workers.vllm.eviction_plugin import category_of, log
from workers.vllm.reuse_order import ReuseOrder


class OrderedFreeBlocks:
    """Stands in for vLLM's FreeKVCacheBlockQueue, method by method, over a ReuseOrder."""

    def __init__(
        self, blocks: Sequence[KVCacheBlock], order: ReuseOrder, clock: Callable[[], float]
    ) -> None:
        self._blocks = blocks
        self._order = order
        self._clock = clock

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
        return self._order.free_count

    def popleft(self) -> KVCacheBlock:
        """Take the next free block."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the next n free blocks."""
        return [self._blocks[block] for block in self._order.evict(n, self._clock())]

    def remove(self, block: KVCacheBlock) -> None:
        """A free block was hit."""
        self._order.take(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        """A block with content became free."""
        self.append_n([block])

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks with content became free, the one to evict first coming first."""
        self._order.release([block.block_id for block in blocks], self._clock())

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Blocks without content became free, the next to go coming first."""
        self._order.release_empty([block.block_id for block in blocks])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All, as they would be evicted at this moment."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Those behind the cursor, as they would be evicted at this moment."""
        blocks = self._order.in_order(self._clock())
        if cursor is not None:
            for block in blocks:
                if block == cursor.block_id:
                    break
        yield from (self._blocks[block] for block in blocks)


class WorkloadAwareBlockPool(BlockPool):  # type: ignore[misc]  # vLLM is not there for mypy
    """A pool whose free blocks are evicted by category; see ReuseOrder.

    Attributes:
        clock: seconds, never going back.
        category: of the request that blocks are being allocated for; None: of none.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.category: str | None = None
        self._categories_told_count = 0
        self.order = ReuseOrder(len(self.blocks), taken=[self.null_block.block_id])
        if self.enable_caching:
            for block in self.blocks:
                block.prev_free_block = block.next_free_block = None
            self.free_block_queue = OrderedFreeBlocks(self.blocks, self.order, self.clock)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As vLLM's; what has got a hash belongs to the request's category from now on."""
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs
        )
        if num_cached_blocks >= num_full_blocks:
            return
        category, now_s = category_of(request), self.clock()
        for block in blocks[num_cached_blocks:num_full_blocks]:
            if block.block_hash is not None and not block.is_null:
                self.order.store(block.block_id, block.block_hash, category, now_s)
        self._tell_categories()

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """As vLLM's; a hit by a request is a reuse."""
        if self.enable_caching and self.category is not None:
            now_s = self.clock()
            for block in blocks:
                if not block.is_null:
                    self.order.hit(block.block_id, self.category or None, now_s)
            self._tell_categories()
        super().touch(blocks)

    def _tell_categories(self) -> None:
        """Log those that have become known: few, as their number is bounded."""
        if self.order.categories_count > self._categories_told_count:
            for name in list(self.order.categories)[self._categories_told_count :]:
                self._categories_told_count += 1
                log.info("category %r is new: %d", name, self._categories_told_count)

    def reset_prefix_cache(self) -> bool:
        """As vLLM's; all free blocks are empty then."""
        was_reset = bool(super().reset_prefix_cache())
        if was_reset:
            self.order.forget()
        return was_reset


def install() -> None:
    """Make engine cores use this pool; may be called again."""
    if kv_cache_coordinator.BlockPool is WorkloadAwareBlockPool:
        return
    kv_cache_coordinator.BlockPool = WorkloadAwareBlockPool
    allocate = KVCacheManager.allocate_slots

    def allocate_for_category(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.block_pool
        if not isinstance(pool, WorkloadAwareBlockPool):  # made before this was installed
            return allocate(self, request, *args, **kwargs)
        pool.category = category_of(request) or ""
        try:
            return allocate(self, request, *args, **kwargs)
        finally:
            pool.category = None

    KVCacheManager.allocate_slots = allocate_for_category
