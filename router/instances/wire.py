"""Where an answer goes whose bytes are passed on as they come."""

from collections.abc import Callable
from typing import Protocol


class Wire(Protocol):
    """The other side of a body that is passed on."""

    def write(self, chunks: bytes) -> bool:
        """Send whole chunks, framed; whether the other side reads more slowly than they come."""
        ...

    @property
    def send(self) -> Callable[[bytes], object]:
        """As `write` and nothing around it; raises RuntimeError where the other side has gone."""
        ...

    def on_full(self, full: Callable[[], None] | None) -> None:
        """Call this whenever the other side begins to read more slowly; None: nothing any more."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether the other side reads more slowly than chunks come."""
        ...

    async def drain(self) -> None:
        """Wait until it has read."""
        ...
