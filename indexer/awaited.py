"""Blocks that requests on one slot await: once they are stored, those prefills have ended; pure."""

from collections.abc import Sequence

from indexer.contract.identifiers import BlockHash
from indexer.table.block_table import BlockTable


class Awaited:
    """What the last heartbeat's answer named, at most AWAITED_PER_HEARTBEAT_MAX.

    They are the same for whatever slot they were awaited on, because a hash names the whole prefix.
    """

    def __init__(self) -> None:
        self._blocks: Sequence[BlockHash] = ()

    def hear(self, blocks: Sequence[BlockHash]) -> None:
        """What is awaited from now on."""
        self._blocks = blocks

    def stored(self, table: BlockTable) -> list[BlockHash]:
        """Those of them that the engine has stored."""
        return table.stored(self._blocks) if self._blocks else []
