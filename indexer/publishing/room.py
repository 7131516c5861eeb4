"""Keeps what one rank publishes within what Redis has room for."""

import time
from collections.abc import Callable

import structlog

from indexer.approximate.learned_blocks import LearnedBlocks
from indexer.contract.identifiers import BlockHash, InstanceId
from indexer.publishing.budget import Allowance
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.table.tier_table import TierTable
from indexer.telemetry import Telemetry


class Room:
    """The allowance of a rank, applied to its table.

    Its budget comes with each heartbeat (`memory.py` divides); a server that is full sets a ceiling
    of its own. Beyond them whole chains are withheld, the coldest first and tails first, and come
    back when there is room or when the engine uses them.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        rank: str,
        instance_id: InstanceId,
        canonical_blocks_per_engine_block: float,
        learned: LearnedBlocks,
        tier: Callable[[], TierTable | None] = lambda: None,
    ) -> None:
        """Nothing is limited yet.

        Args:
            telemetry: metrics.
            rank: label of the rank.
            instance_id: for the log.
            canonical_blocks_per_engine_block: canonical blocks in one of the engine's.
            learned: what is published beside the table; it gives way first.
            tier: what is published of the tier at the moment; it gives way next.
        """
        self._learned = learned
        self._tier = tier
        self._telemetry = telemetry
        self._rank = rank
        self._log = structlog.get_logger().bind(rank=rank, instance_id=instance_id)
        self._canonical_blocks_per_engine_block = canonical_blocks_per_engine_block
        self._allowance = Allowance()
        self._is_withholding = False

    def wanted_blocks(self, table: BlockTable) -> int:
        """Canonical blocks published, or withheld for want of room."""
        withheld_blocks = table.withheld_count * self._canonical_blocks_per_engine_block
        return table.published_count + self._beside_blocks + round(withheld_blocks)

    def keep(self, table: BlockTable) -> Delta:
        """What has to be withheld of a table that has changed."""
        blocks_max = self._allowance.blocks_max
        if blocks_max is None:
            return Delta()
        beside = self._trim_beside(blocks_max - table.published_count)
        delta = table.trim(blocks_max)
        return Delta([*beside, *delta.removed], delta.added) if beside else delta

    @property
    def _beside_blocks(self) -> int:
        tier = self._tier()
        return len(self._learned) + (0 if tier is None else len(tier))

    def _trim_beside(self, blocks_max: int) -> list[BlockHash]:
        """Take back what is published beside the table, down to so many blocks."""
        tier = self._tier()
        if tier is None:
            return list(self._learned.trim(blocks_max).removed)
        learned = self._learned.trim(blocks_max - len(tier))
        fitted = tier.fit(max(0, blocks_max - len(self._learned)))
        return [*learned.removed, *fitted.removed]

    def hear(self, budget_blocks: int | None, table: BlockTable) -> list[Delta]:
        """A heartbeat has told the budget, None for none: withhold more, or less."""
        self._allowance.budget_blocks = budget_blocks
        wanted_blocks = self.wanted_blocks(table)
        self._allowance.relax(wanted_blocks, time.monotonic())
        deltas = [self.keep(table)]
        blocks_max = self._allowance.blocks_max
        if table.withheld_count:
            # `readmit` leaves an eighth free for new blocks; where everything fits it need not.
            fits = blocks_max is None or wanted_blocks <= blocks_max
            deltas.append(table.readmit(2 * wanted_blocks if fits else blocks_max or 0))
        self._note(table)
        return deltas

    def found_full(self, table: BlockTable) -> Delta:
        """The server has refused a store for want of memory: an eighth of the blocks gives way."""
        published_blocks = table.published_count + self._beside_blocks
        if not self._allowance.found_full(published_blocks, time.monotonic()):
            return Delta()
        beside = self._trim_beside(self._beside_blocks - published_blocks // 8)
        delta = self.keep(table)
        delta = Delta([*beside, *delta.removed], delta.added)
        self._telemetry.oom_trims.labels(self._rank).inc()
        self._log.warning(
            "redis_out_of_memory",
            blocks_before=published_blocks,
            blocks_withdrawn=len(delta.removed),
            remedy="raise its maxmemory, or set --index_bytes_max well below it",
        )
        self._note(table)
        return delta

    def _note(self, table: BlockTable) -> None:
        """Say so when withholding begins and ends."""
        blocks_max = self._allowance.blocks_max
        budget_blocks = self._telemetry.index_budget_blocks.labels(self._rank)
        budget_blocks.set(-1 if blocks_max is None else blocks_max)
        is_withholding = table.withheld_count > 0
        if is_withholding != self._is_withholding:
            self._is_withholding = is_withholding
            self._log.info(
                "blocks_withheld" if is_withholding else "blocks_readmitted",
                blocks=table.withheld_count,
                blocks_max=blocks_max,
                published=table.published_count,
            )
