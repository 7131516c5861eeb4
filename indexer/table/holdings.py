"""What one rank holds as far as its events tell, and how it is told again after a loss; pure.

The table follows the events batch by batch. When some are lost for good, every block is doubted;
when the whole history is read again, a second table grows beside the first and then replaces it, so
that the index is changed by the difference only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import AllBlocksCleared, Event
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.table.completeness import Completeness
from indexer.table.tier_table import TierTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Holdings as they were behind a batch.

    Attributes:
        sequence: of the batch.
        table: `BlockTable.dump`.
        completeness: `Completeness.dump`.
    """

    sequence: int
    table: object
    completeness: object


class Holdings:
    """Table, place in the history, completeness.

    Attributes:
        table: replaced when history is read again.
        tier: what can be loaded to the device, likewise; None: nothing, as far as is known.
        sequence: of the last batch applied; None before the first.
        revision: grows with every change.
        clears_count: times the engine has dropped its whole cache.
    """

    def __init__(
        self,
        *,
        model_scope: str,
        block_size_tokens: int,
        capacity_blocks: int | None,
        make_tier: Callable[[], TierTable] | None = None,
    ) -> None:
        """Nothing is held yet; `make_tier` makes an empty tier, None where there is none."""
        self._model_scope = model_scope
        self._block_size_tokens = block_size_tokens
        self._capacity_blocks = capacity_blocks
        self._make_tier = make_tier
        self.table = self._empty()
        self.tier = self._empty_tier()
        self.sequence: int | None = None
        self.revision = 0
        self.clears_count = 0
        self._completeness = Completeness(capacity_blocks)
        self._again: BlockTable | None = None
        self._again_tier: TierTable | None = None
        self._again_sequence: int | None = None
        self._again_is_whole = True

    def _empty(self) -> BlockTable:
        return BlockTable(model_scope=self._model_scope, block_size_tokens=self._block_size_tokens)

    def _empty_tier(self) -> TierTable | None:
        return None if self._make_tier is None else self._make_tier()

    def published(self) -> list[BlockHash]:
        """All that is published of device and tier, parents before children."""
        tier = () if self.tier is None else self.tier.published()
        return [*self.table.published(), *tier]

    def completeness_ratio(self) -> float:
        """See `Completeness`."""
        return self._completeness.ratio(self.table)

    # -- events -----------------------------------------------------------------------------------

    def apply(self, sequence: int, events: Iterable[Event]) -> list[Delta]:
        """Apply the next batch."""
        self.sequence = sequence
        self.revision += 1
        if sequence == 0:
            self._completeness.restore()
        deltas = []
        for event in events:
            deltas.append(self.table.apply(event))
            if self.tier is not None:
                deltas += self.tier.hear(event, self.table)
            if isinstance(event, AllBlocksCleared):
                self.clears_count += 1
                self._completeness.restore()
        return deltas

    def clear(self) -> Delta:
        """The engine has dropped its cache, as it says elsewhere."""
        self.revision += 1
        self.clears_count += 1
        self._completeness.restore()
        return _both(self.table.clear(), None if self.tier is None else self.tier.clear())

    def lose(self) -> Delta:
        """Batches are lost, or others than these should have come: every block is doubted."""
        self.revision += 1
        self._completeness.lose(self.table)
        return _both(self.table.doubt(), None if self.tier is None else self.tier.doubt())

    # -- the whole history once more --------------------------------------------------------------

    def apply_again(self, sequence: int, events: Iterable[Event], *, is_whole: bool) -> None:
        """A batch of the engine's history, read from its beginning.

        Args:
            sequence: of the batch.
            events: what could be read of it.
            is_whole: no removal can have been overlooked.
        """
        if self._again is None:
            self._again, self._again_tier = self._empty(), self._empty_tier()
        for event in events:
            self._again.apply(event)
            if self._again_tier is not None:
                self._again_tier.hear(event, self._again)
        if not is_whole:
            self._again.doubt()
            if self._again_tier is not None:
                self._again_tier.doubt()
        self._again_is_whole &= is_whole
        self._again_sequence = sequence

    def resynchronised(self) -> Delta:
        """All of the history was read again; what that changes.

        When it changes nothing, the engine has lost blocks without telling, and so what it told
        cannot be relied on: every block is doubted.
        """
        device_before, before = self.table.published(), self.published()
        self.table = self._again or self._empty()
        self.tier = self._again_tier or self._empty_tier()
        is_whole, self.sequence = self._again_is_whole, self._again_sequence
        self._forget_again()
        self.revision += 1
        self._completeness.restore()
        is_changed = set(device_before) != set(self.table.published())
        if is_whole and is_changed:
            return _difference(before, self.published())
        self.lose()
        return _difference(before, self.published())

    def not_resynchronised(self) -> Delta:
        """It could not be read to its end: what is known is as doubtful as after a loss."""
        self._forget_again()
        return self.lose()

    def _forget_again(self) -> None:
        self._again = self._again_tier = self._again_sequence = None
        self._again_is_whole = True

    # -- checkpoint -------------------------------------------------------------------------------

    def save(self) -> Saved | None:
        """Everything as it is now; None while there is nothing to go on from."""
        if self.sequence is None:
            return None
        return Saved(
            sequence=self.sequence,
            table=self.table.dump(),
            completeness=self._completeness.dump(self.table),
        )

    def load(self, saved: Saved) -> "Holdings":
        """The holdings that were saved, with an empty tier: it fills as the engine writes to it.

        Raises:
            MalformedCheckpoint: they cannot be read.
        """
        loaded = Holdings(
            model_scope=self._model_scope,
            block_size_tokens=self._block_size_tokens,
            capacity_blocks=self._capacity_blocks,
            make_tier=self._make_tier,
        )
        loaded.table = BlockTable.load(
            saved.table,
            model_scope=self._model_scope,
            block_size_tokens=self._block_size_tokens,
        )
        loaded.sequence = saved.sequence
        loaded._completeness.load(saved.completeness, loaded.table)
        return loaded


def _both(device: Delta, tier: Delta | None) -> Delta:
    if tier is None:
        return device
    return Delta([*device.removed, *tier.removed], [*device.added, *tier.added])


def _difference(before: Sequence[BlockHash], after: Sequence[BlockHash]) -> Delta:
    """From one prefix-closed set to another, both parents before children."""
    kept_before, kept_after = set(before), set(after)
    return Delta(
        removed=[block for block in reversed(before) if block not in kept_after],
        added=[block for block in after if block not in kept_before],
    )
