"""In place of a follower where an engine tells no events: an empty table, always up to date."""

import asyncio
from typing import Final

from indexer.engine.engine_metrics import EngineSample
from indexer.errors import EngineRestarted
from indexer.table.holdings import Holdings

SAME_START_S: Final = 1.0
"""Two readings of one process's start differ by less."""


class NoEvents:
    """Stands where `Follower` stands, and tells one engine process from the next.

    Without events no sequence number shows a restart. The process's start time does, or its count
    of first tokens when that has become less; where it tells neither, whoever was away is taken for
    another one. What is known is then forgotten, as with every new engine process.

    Attributes:
        holdings: empty for ever.
    """

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self._was_away = False
        self._started_s: float | None = None
        self._first_tokens_count: int | None = None

    @property
    def is_sure(self) -> bool:
        """Nothing can have been missed."""
        return True

    @property
    def silence_s(self) -> float:
        """Nobody expects to hear anything."""
        return 0.0

    def check(self) -> None:
        """The engine did not answer, or we stood still: it may be another one."""
        self._was_away = True

    def resync(self, _: str) -> None:
        """There is no history to read again."""

    async def receive(self, _: str) -> None:
        """Hear nothing until cancelled."""
        await asyncio.get_running_loop().create_future()

    async def keep_checkpoint(self) -> None:
        """Keep none."""

    def look(self, sample: EngineSample | None) -> None:
        """The engine has answered.

        Raises:
            EngineRestarted: it is another process than before.
        """
        started_s = None if sample is None else sample.started_s
        totals = None if sample is None else sample.totals
        first_tokens_count = None if totals is None else totals.first_tokens_count
        before_s, self._started_s = self._started_s, started_s
        before_count, self._first_tokens_count = self._first_tokens_count, first_tokens_count
        was_away, self._was_away = self._was_away, False
        if before_s is not None and started_s is not None:
            if abs(started_s - before_s) > SAME_START_S:
                raise EngineRestarted(f"its process started at {started_s:.0f}, not {before_s:.0f}")
        elif before_count is not None and first_tokens_count is not None:
            if first_tokens_count < before_count:
                raise EngineRestarted("it counts its first tokens anew")
        elif was_away:
            raise EngineRestarted("it was away, and nothing tells whether it is the same process")
