"""The door: bounds on requests and bytes in flight, and the drain."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from router import telemetry
from router.errors import Draining, Overloaded


class Ticket:
    """A request's place among those in flight, and the bytes held for it."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self.held_bytes = 0

    def hold(self, count_bytes: int) -> None:
        """Count bytes that have arrived for the request.

        Raises:
            Overloaded: all requests in flight would hold more than is allowed.
        """
        self._admission.take_bytes(count_bytes)
        self.held_bytes += count_bytes


class Admission:
    """Admits requests up to two bounds, and none at all while draining.

    Args:
        requests_max: requests in flight.
        bytes_max: bytes of request bodies held for them.
    """

    def __init__(self, *, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._requests = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return self._requests

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """Admit one request until the context ends.

        Raises:
            Draining: the door is closed.
            Overloaded: as many requests as allowed are in flight.
        """
        if self._closed:
            telemetry.ADMISSION_REFUSALS.labels(bound="draining").inc()
            raise Draining("This router is stopping: repeat the request, another one will take it.")
        if self._requests >= self._requests_max:
            telemetry.ADMISSION_REFUSALS.labels(bound="requests").inc()
            raise Overloaded(
                f"This router already has {self._requests} requests in flight, as many as "
                "in_flight_requests_max allows. Repeat the request later."
            )
        ticket = Ticket(self)
        self._requests += 1
        self._empty.clear()
        telemetry.IN_FLIGHT_REQUESTS.set(self._requests)
        try:
            yield ticket
        finally:
            self._requests -= 1
            self._bytes -= ticket.held_bytes
            telemetry.IN_FLIGHT_REQUESTS.set(self._requests)
            telemetry.IN_FLIGHT_BYTES.set(self._bytes)
            if self._requests == 0:
                self._empty.set()

    def take_bytes(self, count_bytes: int) -> None:
        """See `Ticket.hold`."""
        if self._bytes + count_bytes > self._bytes_max:
            telemetry.ADMISSION_REFUSALS.labels(bound="bytes").inc()
            raise Overloaded(
                f"This router already holds {self._bytes} bytes of requests, and "
                f"in_flight_bytes_max allows {self._bytes_max}. Repeat the request later."
            )
        self._bytes += count_bytes
        telemetry.IN_FLIGHT_BYTES.set(self._bytes)

    def announce_drain(self) -> None:
        """Say that this router will stop: not ready from now on, still admitting."""
        self.draining = True

    async def drain(self, deadline_s: float) -> int:
        """Admit nothing from now on and wait for the requests in flight.

        Returns:
            How many were still in flight at the deadline.
        """
        self.draining = self._closed = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return self._requests
        return 0
