"""Deadlines of many waits that are equally long, with one timer for all of them.

`asyncio.timeout` arms a timer of the event loop for each wait and takes it away again, which costs
more than most of the waits it guards: nearly all of them end long before. Waits of one length end
in the order in which they began, so only the oldest one needs a timer.
"""

import asyncio
from types import TracebackType
from typing import Final, Self, final


@final
class Waits:
    """Waits of one length, as `with waits.one(): ...` around the awaiting code.

    What is awaited is cancelled when the time is over, and TimeoutError is raised, as
    `asyncio.timeout` does it; at most a turn of the event loop later. For one event loop at a time.

    Args:
        length_s: of every wait.
    """

    __slots__ = ("_loop", "_open", "_timer", "length_s")

    def __init__(self, length_s: float) -> None:
        self.length_s: Final = length_s
        self._open: dict[Wait, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def one(self) -> "Wait":
        """A wait that begins where it is entered."""
        return Wait(self)

    def begin(self, wait: "Wait", loop: asyncio.AbstractEventLoop) -> None:
        """For `Wait` alone: the wait has begun."""
        self._open[wait] = None
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_at(wait.deadline_s, self._look, loop)

    def end(self, wait: "Wait") -> None:
        """For `Wait` alone: the wait is over."""
        self._open.pop(wait, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the waits whose time is over; the timer is for the oldest of the others."""
        self._timer = None
        now_s = loop.time()
        late = []
        for wait in self._open:
            if wait.deadline_s > now_s:
                self._timer = loop.call_at(wait.deadline_s, self._look, loop)
                break
            late.append(wait)
        for wait in late:
            del self._open[wait]
            wait.expire()


@final
class Wait:
    """One wait.

    Attributes:
        deadline_s: the event loop's time at which it ends.
        expired: its time was over before what is awaited had ended.
    """

    __slots__ = ("_cancelling", "_task", "_waits", "deadline_s", "expired")

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self.deadline_s = 0.0
        self.expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be cancelled when the time is over")
        loop = task.get_loop()
        self._task = task
        self._cancelling = task.cancelling()
        self.deadline_s = loop.time() + self._waits.length_s
        self._waits.begin(self, loop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if not self.expired:
            self._waits.end(self)
        # Somebody else may have cancelled the task as well: then it stays cancelled.
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    @property
    def over(self) -> bool:
        """Whether the time, and nobody else, has cancelled what is awaited."""
        return self.expired and self._task.cancelling() - 1 <= self._cancelling

    def expire(self) -> None:
        """For `Waits` alone: cancel what is awaited."""
        self.expired = True
        self._task.cancel()
