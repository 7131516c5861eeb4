"""The door: bounds on requests and bytes in flight, a line in front of it, and the drain.

A request that finds no place free may wait for one. It is read meanwhile: its priority may stand in
its body, a client that leaves shows only when all it has sent has been read, and a place is too
dear to be held while a body trickles in. What is read counts against the bytes.
"""

import asyncio
from types import TracebackType
from typing import Final, Self

from router import telemetry
from router.door.visitor import ANYBODY, Visitor
from router.door.waiting_line import WaitingLine
from router.errors import Draining, Overloaded, QueueTimeout

CUT_OFF: Final = (
    "This router has stopped before the answer was complete (drain_deadline_s): repeat the "
    "request, another one will take it."
)

Turn = asyncio.Future[None]
"""Done when a place has been handed over, failed when there will be none."""


class Ticket:
    """A request's place among those in flight or before them, and the bytes held for it.

    Use as a context manager, see `Admission.enter`. A request that the end of the drain cuts off is
    cancelled, and `Draining` is raised as the `with` ends.

    Attributes:
        held_bytes: counted for it.
        placed: it has a place; else it is one of those who will wait for one.
    """

    __slots__ = ("_admission", "_cancelling", "_cut", "_task", "_visitor", "held_bytes", "placed")

    def __init__(self, admission: "Admission", visitor: Visitor) -> None:
        self._admission = admission
        self._visitor = visitor
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._cut = False
        self.held_bytes = 0
        self.placed = False

    def __enter__(self) -> Self:
        self.placed = self._admission.admit(self, self._visitor)
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._admission.leave(self)
        if not self._cut or self._task is None:
            return
        # The client may have gone as well: then it stays cancelled.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Draining(CUT_OFF) from error

    def cut_off(self) -> None:
        """For `Admission` alone: the drain is over, and this request with it."""
        if self._task is not None and not self._cut:
            self._cut = self._task.cancel()

    def hold(self, count_bytes: int) -> None:
        """Count bytes that have arrived for the request.

        Raises:
            Overloaded: all requests would hold more than is allowed.
        """
        self._admission.take_bytes(count_bytes)
        self.held_bytes += count_bytes

    async def wait_for_place(self, body: bytes = b"") -> None:
        """Go on as one of those in flight, at once for who has a place already.

        Args:
            body: of the request, in which the priority may stand.

        Raises:
            QueueTimeout: no place has become free in time.
            Overloaded: it gave way to a more important one.
            Draining: the door has been closed.
        """
        if not self.placed:
            await self._admission.wait_for_place(self, self._visitor, body)


class Admission:
    """Admits requests up to bounds, lets some wait, and admits none while draining.

    Args:
        requests_max: requests in flight.
        bytes_max: bytes of request bodies held for them and for those that wait.
        queue_requests_max: requests that wait for a place, or are read in order to; 0 for none.
        queue_deadline_s: how long one waits.
    """

    def __init__(
        self,
        *,
        requests_max: int,
        bytes_max: int,
        queue_requests_max: int = 0,
        queue_deadline_s: float = 1.0,
    ) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._queue_requests_max = queue_requests_max
        self._queue_deadline_s = queue_deadline_s
        self._bytes = 0
        self._requests = 0
        self._queued = 0  # being read, or in the line
        self._line: WaitingLine[Turn] = WaitingLine()
        self._closed = False
        self._tickets: set[Ticket] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        telemetry.IN_FLIGHT_REQUESTS.set_function(lambda: self._requests)
        telemetry.IN_FLIGHT_BYTES.set_function(lambda: self._bytes)
        telemetry.QUEUED_REQUESTS.set_function(lambda: self._queued)

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return self._requests

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return self._queued

    def enter(self, visitor: Visitor = ANYBODY) -> Ticket:
        """Let one request in for the time of a `with`, to a place or to wait for one.

        Args:
            visitor: whose importance counts, and whose turn it is among equals; in a full queue it
                may take the stead of a less important one, or of a caller's who has more waiting.

        Raises:
            Draining: as the `with` begins: the door is closed.
            Overloaded: likewise: as many requests as allowed are in flight, and as many wait.
        """
        return Ticket(self, visitor)

    def admit(self, ticket: Ticket, visitor: Visitor) -> bool:
        """For `Ticket` alone, see `enter`; whether there is a place at once."""
        if self._closed:
            raise _draining()
        placed = self._has_room()
        if placed:
            self._requests += 1
        else:
            self._make_room(visitor)
            self._queued += 1
        self._tickets.add(ticket)
        self._empty.clear()
        return placed

    def leave(self, ticket: Ticket) -> None:
        """For `Ticket` alone: its request has ended."""
        self._tickets.discard(ticket)
        self._bytes -= ticket.held_bytes
        if ticket.placed:
            self._requests -= 1
            self._hand_over()
        else:
            self._queued -= 1
        if self._requests == 0 and self._queued == 0:
            self._empty.set()

    async def wait_for_place(self, ticket: Ticket, visitor: Visitor, body: bytes) -> None:
        """See `Ticket.wait_for_place`."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        if self._closed:
            raise _draining()
        if self._has_room():
            self._requests += 1
            self._place(ticket)
            return
        turn: Turn = loop.create_future()
        place = self._line.join(visitor.priority_of(body), turn, visitor.caller_name)
        try:
            async with asyncio.timeout(self._queue_deadline_s):
                await turn
        except TimeoutError:
            if not _handed_over(turn):
                telemetry.ADMISSION_REFUSALS.labels(bound="queue_deadline").inc()
                raise QueueTimeout(
                    f"No place became free within {self._queue_deadline_s:g} s "
                    "(queue_deadline_s). Repeat the request later."
                ) from None
        except asyncio.CancelledError:
            if _handed_over(turn):  # a moment too late for it, not for the next
                self._requests -= 1
                self._hand_over()
            raise
        finally:
            self._line.leave(place)
            telemetry.QUEUE_SECONDS.observe(loop.time() - begun_s)
        self._place(ticket)

    def take_bytes(self, count_bytes: int) -> None:
        """See `Ticket.hold`."""
        if self._bytes + count_bytes > self._bytes_max:
            telemetry.ADMISSION_REFUSALS.labels(bound="bytes").inc()
            raise Overloaded(
                f"This router already holds {self._bytes} bytes of requests, and "
                f"in_flight_bytes_max allows {self._bytes_max}. Repeat the request later."
            )
        self._bytes += count_bytes

    def announce_drain(self) -> None:
        """Say that this router will stop: not ready from now on, still admitting."""
        self.draining = True

    def resume(self) -> None:
        """Take an announced drain back; a closed door stays closed."""
        self.draining = self._closed

    async def drain(self, deadline_s: float) -> int:
        """Admit nothing from now on and wait for the requests in flight.

        Those that wait are refused: nothing has begun for them, and another router has a place.

        Returns:
            How many were still in flight at the deadline.
        """
        self.draining = self._closed = True
        while self._line:
            _fail(self._line.take_first(), _draining())
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return self._requests
        return 0

    def cut_off(self) -> None:
        """End the requests that the drain has left, each with `Draining`."""
        for ticket in tuple(self._tickets):
            ticket.cut_off()

    def _has_room(self) -> bool:
        return self._requests < self._requests_max and not self._line

    def _place(self, ticket: Ticket) -> None:
        """Of a request that waited; its place is counted already."""
        ticket.placed = True
        self._queued -= 1

    def _hand_over(self) -> None:
        """Give a place that has become free to whose turn it is; it counts from now on."""
        while self._line and self._requests < self._requests_max:
            turn = self._line.take_first()
            if not turn.done():
                self._requests += 1
                turn.set_result(None)

    def _make_room(self, visitor: Visitor) -> None:
        """Let one more wait, in the stead of another where the queue is full.

        Raises:
            Overloaded: nobody gives way.
        """
        if self._queued < self._queue_requests_max:
            return
        # Without a header it is not known yet: the body, which may say so, comes later.
        known = visitor.asked_priority is not None
        priority, caller = visitor.priority_of(b""), visitor.caller_name
        if self._line.gives_way_to(priority, caller, priority_is_known=known):
            _fail(self._line.take_last(), self._overloaded("displaced"))
            return
        raise self._overloaded("queue" if self._queue_requests_max else "requests")

    def _overloaded(self, bound: str) -> Overloaded:
        telemetry.ADMISSION_REFUSALS.labels(bound=bound).inc()
        return Overloaded(
            f"This router already has {self._requests} requests in flight, as many as "
            f"in_flight_requests_max allows, and {self._queued} wait (queue_requests_max). "
            "Repeat the request later."
        )


def _handed_over(turn: Turn) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None


def _fail(turn: Turn, error: Exception) -> None:
    if not turn.done():
        turn.set_exception(error)


def _draining() -> Draining:
    telemetry.ADMISSION_REFUSALS.labels(bound="draining").inc()
    return Draining("This router is stopping: repeat the request, another one will take it.")
