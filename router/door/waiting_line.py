"""Who waits for a place, in the order in which places are given out. Pure."""

from bisect import bisect_left, insort
from itertools import count
from typing import Final, Generic, TypeVar

Guest = TypeVar("Guest")

PRIORITY_MIN: Final = -1000
PRIORITY_MAX: Final = 1000
"""Beyond these priorities are held there: a queue that long has no use for finer ones."""


class WaitingLine(Generic[Guest]):
    """A line ordered by priority, lower first, and by arrival among equals.

    Kept sorted: a line is as long as the bound of the queue, a few thousand at most, and both ends
    are wanted, the first to be served and the last to give way.
    """

    def __init__(self) -> None:
        self._line: list[tuple[int, int]] = []
        self._guests: dict[int, Guest] = {}
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._line)

    def join(self, priority: int, guest: Guest) -> tuple[int, int]:
        """Stand in the line; returns the place, for `leave`."""
        place = (priority, next(self._arrivals))
        insort(self._line, place)
        self._guests[place[1]] = guest
        return place

    def leave(self, place: tuple[int, int]) -> bool:
        """Leave the line; False for who is not in it any more."""
        if self._guests.pop(place[1], None) is None:
            return False
        del self._line[bisect_left(self._line, place)]
        return True

    def take_first(self) -> Guest:
        """Whose turn it is; the line must not be empty."""
        return self._guests.pop(self._line.pop(0)[1])

    def take_last(self) -> Guest:
        """Who came last of the least important; the line must not be empty."""
        return self._guests.pop(self._line.pop()[1])

    @property
    def worst_priority(self) -> int | None:
        """Of the last in the line; None for an empty one."""
        return self._line[-1][0] if self._line else None


def held_priority(priority: int, *, most_important: int = PRIORITY_MIN) -> int:
    """A priority as it counts here.

    Args:
        priority: as asked for; lower is more important, 0 is what nobody asks for.
        most_important: the lowest that whoever asks may have.
    """
    return min(PRIORITY_MAX, max(priority, most_important, PRIORITY_MIN))
