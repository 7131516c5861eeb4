"""How much of what an engine may hold its sidecar is sure to know; pure."""

from indexer.errors import MalformedCheckpoint
from indexer.table.block_table import BlockTable


class Completeness:
    """Follows losses of an engine's history until they are made good.

    The ratio is 1 while every event since the engine's start, or since it last dropped its whole
    cache, was seen. After a loss the engine may hold anything in any of its blocks, so the ratio is
    the larger of two shares of its capacity: the blocks that are known to be there, and the blocks
    stored since the loss (when that is a capacity's worth, whatever was missed has been evicted or
    was used again and thereby confirmed). It reaches 1 when either does, or when the history is
    read again from its beginning.
    """

    def __init__(self, capacity_blocks: int | None) -> None:
        """Nothing is lost yet.

        Args:
            capacity_blocks: device blocks of the engine's own size; None when it does not tell:
                then those known when history was lost stand for it.
        """
        self._capacity_blocks = capacity_blocks
        self._is_lost = False
        self._stored_then = 0
        self._blocks_then = 0

    def lose(self, table: BlockTable) -> None:
        """Events were lost; `table` as it was before that."""
        self._is_lost = True
        self._stored_then = table.stored_count
        self._blocks_then = max(len(table), 1)

    def restore(self) -> None:
        """Everything that the engine holds is known."""
        self._is_lost = False

    def dump(self, table: BlockTable) -> object:
        """What is lost, for a checkpoint."""
        stored_count = table.stored_count - self._stored_then
        return [self._is_lost, stored_count, self._blocks_then]

    def load(self, dump: object, table: BlockTable) -> None:
        """Take over what was dumped.

        Raises:
            MalformedCheckpoint: it is no such dump.
        """
        match dump:
            case [bool() as is_lost, int() as stored_count, int() as blocks_then]:
                self._is_lost = is_lost
                self._stored_then = table.stored_count - stored_count
                self._blocks_then = max(blocks_then, 1)
            case _:
                raise MalformedCheckpoint(f"no completeness: {dump!r}")

    def ratio(self, table: BlockTable) -> float:
        """0..1; call it regularly: a ratio that reached 1 stays 1 until the next loss."""
        if not self._is_lost:
            return 1.0
        capacity = self._capacity_blocks or self._blocks_then
        doubted_count = table.set_aside_count - table.withheld_count
        known_count = len(table) - doubted_count - table.unplaced_count
        share = max(known_count, table.stored_count - self._stored_then) / capacity
        self._is_lost = share < 1.0
        return min(share, 1.0)
