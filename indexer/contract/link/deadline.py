"""What every link does alike: one command is a batch of one, and a batch has a deadline."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from indexer.contract.functions import Command


class DeadlineLink(ABC):
    """A link whose calls end by themselves.

    Args:
        deadline_s: after which a call raises TimeoutError; None when callers have theirs.
    """

    def __init__(self, *, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s

    async def execute_command(self, *command: bytes | str | float) -> Any:
        """One command, one answer; see `Link`."""
        (reply,) = await self.execute([command])
        return reply

    async def execute(self, commands: Iterable[Command]) -> list[Any]:
        """Several commands, their answers in order; see `Link`."""
        if self._deadline_s is None:
            return await self._execute(commands)
        async with asyncio.timeout(self._deadline_s):
            return await self._execute(commands)

    @abstractmethod
    async def _execute(self, commands: Iterable[Command]) -> list[Any]:
        """Send the commands and await their answers."""
