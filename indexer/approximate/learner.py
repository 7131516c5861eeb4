"""Takes what routers say an engine has computed, and publishes it beside the rank's table."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgpack
import structlog

from indexer.approximate.learned_blocks import LearnedBlocks
from indexer.contract import block_hash
from indexer.contract.limits import BLOCK_HASH_BYTES, BLOCKS_PER_LOOKUP_MAX, NOTICE_BLOCKS_MAX
from indexer.contract.records import InstanceRecord, Notice
from indexer.engine.engine_metrics import EngineSample
from indexer.publishing.publisher import Publisher
from indexer.table.holdings import Holdings
from indexer.telemetry import Telemetry

LEARNED_BLOCKS_MAX: Final = 1 << 18
"""Of one rank, about 60 MB here; a larger KV$ is learned in part."""

LEARNED_BLOCKS_ASSUMED: Final = 1 << 13
"""Of an engine that does not tell its KV$'s size: 131,072 tokens in blocks of 16."""


class Learner:
    """What one rank's engine is said to have computed, as long as it may still have it.

    It is forgotten when it was used longest ago and the engine's KV$ is full of other things, by
    number of blocks or by what the engine says to have computed since; when the engine drops its
    cache; and when the index has no room (`Room`). Neither the table nor its completeness knows of
    it, and no loss of events concerns it.

    Attributes:
        blocks: learned, and not forgotten.
    """

    def __init__(
        self,
        publisher: Publisher,
        telemetry: Telemetry,
        *,
        rank: str,
        record: InstanceRecord,
        reuses_prefixes: bool,
        block_size_tokens: int,
        blocks_max: Callable[[], int] = lambda: LEARNED_BLOCKS_MAX,
    ) -> None:
        """Nothing is learned yet.

        Args:
            publisher: of the rank.
            telemetry: metrics.
            rank: label of the rank.
            record: of its engine, for the size of its KV$.
            reuses_prefixes: whether its engine does; else nothing is learned.
            block_size_tokens: the fleet's.
            blocks_max: at most, whatever the size of the KV$; asked again with every look.
        """
        self._publisher = publisher
        self._telemetry = telemetry
        self._rank = rank
        self._block_size_tokens = block_size_tokens
        self._held_blocks = _blocks_held(record, block_size_tokens) if reuses_prefixes else 0
        self._blocks_max = blocks_max
        self.blocks = LearnedBlocks(min(self._held_blocks, blocks_max()))
        self._computed_blocks = 0.0
        self._computed_tokens: int | None = None
        self._clears_count = 0
        self._log = structlog.get_logger().bind(rank=rank, instance_id=record.instance_id)

    def look(self, sample: EngineSample | None, holdings: Holdings) -> None:
        """What the engine shows now; forgets what it cannot have any more."""
        if holdings.clears_count != self._clears_count:
            self._clears_count = holdings.clears_count
            self.clear()
        self.blocks.blocks_max = min(self._held_blocks, self._blocks_max())
        self._publisher.offer([self.blocks.trim(self.blocks.blocks_max)], None)
        tokens = None if sample is None else sample.computed_tokens
        before, self._computed_tokens = self._computed_tokens, tokens
        if tokens is not None and before is not None:
            self._computed_blocks += max(0, tokens - before) / self._block_size_tokens
            self._publisher.offer([self.blocks.expire(self._computed_blocks)], None)
        self._telemetry.learned_blocks.labels(self._rank).set(len(self.blocks))

    def clear(self) -> None:
        """The engine has dropped its cache."""
        self._publisher.offer([self.blocks.clear()], None)

    def take(self, notices: Sequence[bytes]) -> list[bytes]:
        """Learn from the notices of computed chains; returns the others."""
        others, counts, deltas = [], Counter[str](), []
        for raw in notices:
            try:
                notice = Notice.decode(raw)
            except (TypeError, ValueError, msgpack.UnpackException, RecursionError):
                others.append(raw)  # whoever judges them says what is wrong
                continue
            if not notice.computed:
                others.append(raw)
            elif not _is_sound(notice):
                counts["malformed"] += 1
            else:
                unanchored_count = self.blocks.unanchored_count
                chain = block_hash.split(notice.hashes)
                deltas.append(
                    self.blocks.learn(
                        chain,
                        first_block=notice.first_block,
                        computed_blocks=self._computed_blocks,
                    )
                )
                was_anchored = self.blocks.unanchored_count == unanchored_count
                counts["learned" if was_anchored else "unanchored"] += 1
        for outcome, count in counts.items():
            self._telemetry.computed_notices.labels(self._rank, outcome).inc(count)
        if counts["malformed"]:
            self._log.warning("computed_notices_malformed", notices=counts["malformed"])
        self._publisher.offer(deltas, None)
        return others


def _blocks_held(record: InstanceRecord, block_size_tokens: int) -> int:
    """What its KV$ holds, in canonical blocks."""
    if record.capacity_blocks is None:
        return LEARNED_BLOCKS_ASSUMED
    return math.floor(record.capacity_blocks * record.block_size_tokens / block_size_tokens)


def _is_sound(notice: Notice) -> bool:
    """Whether the fields are what they are to be; any writer of Redis may have made them."""
    hashes, first = notice.hashes, notice.first_block
    return (
        type(hashes) is bytes
        and 0 < len(hashes) <= NOTICE_BLOCKS_MAX * BLOCK_HASH_BYTES
        and len(hashes) % BLOCK_HASH_BYTES == 0
        and type(first) is int
        and 0 <= first <= BLOCKS_PER_LOOKUP_MAX
    )
