"""Who waits for a place, in the order in which places are given out. Pure."""

from collections import OrderedDict
from itertools import count
from typing import Final, Generic, TypeVar

Guest = TypeVar("Guest")

PRIORITY_MIN: Final = -1000
PRIORITY_MAX: Final = 1000
"""Beyond these priorities are held there: a queue that long has no use for finer ones."""


Place = tuple[int, str | None, int]
"""Priority, caller, arrival."""

_Guests = OrderedDict[int, Guest]
"""Of one caller, by arrival."""


class WaitingLine(Generic[Guest]):
    """A line ordered by priority, lower first; among equals callers take turns, each in its order.

    So whoever has little waiting is served after at most one request of each other caller, however
    many those have (fair queueing; Nagle, RFC 970). A caller that comes is the last to have a turn.
    """

    def __init__(self) -> None:
        # By priority, callers in the order of their turns; none of them is empty.
        self._equals: dict[int, OrderedDict[str | None, _Guests[Guest]]] = {}
        self._arrivals = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def join(self, priority: int, guest: Guest, caller: str | None = None) -> Place:
        """Stand in the line; returns the place, for `leave`.

        Args:
            priority: lower is more important.
            guest: who waits.
            caller: whose request it is; those of nobody in particular are one caller's.
        """
        arrival = next(self._arrivals)
        callers = self._equals.setdefault(priority, OrderedDict())
        callers.setdefault(caller, OrderedDict())[arrival] = guest
        self._length += 1
        return priority, caller, arrival

    def leave(self, place: Place) -> bool:
        """Leave the line; False for who is not in it any more."""
        priority, caller, arrival = place
        callers = self._equals.get(priority)
        guests = None if callers is None else callers.get(caller)
        if guests is None or arrival not in guests:
            return False
        del guests[arrival]
        self._one_less(priority, caller)
        return True

    def take_first(self) -> Guest:
        """Whose turn it is; the line must not be empty."""
        priority = min(self._equals)
        callers = self._equals[priority]
        caller = next(iter(callers))
        _, guest = callers[caller].popitem(last=False)
        callers.move_to_end(caller)
        self._one_less(priority, caller)
        return guest

    def take_last(self) -> Guest:
        """The last of the caller with most waiting of the least important; must not be empty."""
        priority = max(self._equals)
        caller = _greediest(self._equals[priority])
        _, guest = self._equals[priority][caller].popitem()
        self._one_less(priority, caller)
        return guest

    def gives_way_to(
        self, priority: int, caller: str | None, *, priority_is_known: bool = True
    ) -> bool:
        """Whether whom `take_last` takes should: it is less important, or of equals has more.

        Args:
            priority: of a newcomer.
            caller: whose request it is.
            priority_is_known: it is final; else only an equal gives way.
        """
        if not self._equals:
            return False
        worst = max(self._equals)
        callers = self._equals[worst]
        if priority != worst:
            return priority_is_known and priority < worst
        return len(callers.get(caller, ())) + 1 < len(callers[_greediest(callers)])

    def _one_less(self, priority: int, caller: str | None) -> None:
        self._length -= 1
        callers = self._equals[priority]
        if not callers[caller]:
            del callers[caller]
        if not callers:
            del self._equals[priority]


def _greediest(callers: OrderedDict[str | None, _Guests[Guest]]) -> str | None:
    """Of those with as many, whose turn comes last."""
    return max(reversed(callers), key=lambda caller: len(callers[caller]))


def held_priority(priority: int, *, most_important: int = PRIORITY_MIN) -> int:
    """A priority as it counts here.

    Args:
        priority: as asked for; lower is more important, 0 is what nobody asks for.
        most_important: the lowest that whoever asks may have.
    """
    return min(PRIORITY_MAX, max(priority, most_important, PRIORITY_MIN))
