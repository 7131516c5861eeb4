"""What one rank holds as far as its events tell, and how it is told again after a loss; pure.

The table follows the events batch by batch. When some are lost for good, every block is doubted;
when the whole history is read again, a second table grows beside the first and then replaces it, so
that the index is changed by the difference only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import AllBlocksCleared, Event
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.table.completeness import Completeness


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
        sequence: of the last batch applied; None before the first.
        revision: grows with every change.
        clears_count: times the engine has dropped its whole cache.
    """

    def __init__(
        self, *, model_scope: str, block_size_tokens: int, capacity_blocks: int | None
    ) -> None:
        self._model_scope = model_scope
        self._block_size_tokens = block_size_tokens
        self._capacity_blocks = capacity_blocks
        self.table = self._empty()
        self.sequence: int | None = None
        self.revision = 0
        self.clears_count = 0
        self._completeness = Completeness(capacity_blocks)
        self._again: BlockTable | None = None
        self._again_sequence: int | None = None
        self._again_is_whole = True

    def _empty(self) -> BlockTable:
        return BlockTable(model_scope=self._model_scope, block_size_tokens=self._block_size_tokens)

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
            if isinstance(event, AllBlocksCleared):
                self.clears_count += 1
                self._completeness.restore()
        return deltas

    def clear(self) -> Delta:
        """The engine has dropped its cache, as it says elsewhere."""
        self.revision += 1
        self.clears_count += 1
        self._completeness.restore()
        return self.table.clear()

    def lose(self) -> Delta:
        """Batches are lost, or others than these should have come: every block is doubted."""
        self.revision += 1
        self._completeness.lose(self.table)
        return self.table.doubt()

    # -- the whole history once more --------------------------------------------------------------

    def apply_again(self, sequence: int, events: Iterable[Event], *, is_whole: bool) -> None:
        """A batch of the engine's history, read from its beginning.

        Args:
            sequence: of the batch.
            events: what could be read of it.
            is_whole: no removal can have been overlooked.
        """
        if self._again is None:
            self._again = self._empty()
        for event in events:
            self._again.apply(event)
        if not is_whole:
            self._again.doubt()
        self._again_is_whole &= is_whole
        self._again_sequence = sequence

    def resynchronised(self) -> Delta:
        """All of the history was read again; what that changes.

        When it changes nothing, the engine has lost blocks without telling, and so what it told
        cannot be relied on: every block is doubted.
        """
        before, self.table = self.table.published(), self._again or self._empty()
        is_whole, self.sequence = self._again_is_whole, self._again_sequence
        self._forget_again()
        self.revision += 1
        self._completeness.restore()
        delta = _difference(before, self.table.published())
        if is_whole and (delta.removed or delta.added):
            return delta
        self.lose()
        return _difference(before, self.table.published())

    def not_resynchronised(self) -> Delta:
        """It could not be read to its end: what is known is as doubtful as after a loss."""
        self._forget_again()
        return self.lose()

    def _forget_again(self) -> None:
        self._again = self._again_sequence = None
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
        """The holdings that were saved.

        Raises:
            MalformedCheckpoint: they cannot be read.
        """
        loaded = Holdings(
            model_scope=self._model_scope,
            block_size_tokens=self._block_size_tokens,
            capacity_blocks=self._capacity_blocks,
        )
        loaded.table = BlockTable.load(
            saved.table,
            model_scope=self._model_scope,
            block_size_tokens=self._block_size_tokens,
        )
        loaded.sequence = saved.sequence
        loaded._completeness.load(saved.completeness, loaded.table)
        return loaded


def _difference(before: Sequence[BlockHash], after: Sequence[BlockHash]) -> Delta:
    """From one prefix-closed set to another, both parents before children."""
    kept_before, kept_after = set(before), set(after)
    return Delta(
        removed=[block for block in reversed(before) if block not in kept_after],
        added=[block for block in after if block not in kept_before],
    )
