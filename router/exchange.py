"""One request and its answer, as the flow sees the HTTP side."""

from collections.abc import Mapping
from typing import Protocol

from router.door.admission import Ticket
from router.door.visitor import Visitor
from router.errors import RouterError
from router.instances.answer import Answer
from router.instances.wire import Wire
from router.requests.api_call import ApiCall
from router.snapshot import Decision


class Exchange(Protocol):
    """One request and its answer, as the HTTP side holds them."""

    @property
    def started(self) -> bool:
        """Whether a part of the answer may have reached the client."""
        ...

    @property
    def visitor(self) -> Visitor:
        """Who asks, as far as it is known before the body."""
        ...

    async def receive(self, ticket: Ticket) -> ApiCall:
        """Read and check the request.

        Raises:
            RequestInvalid, BodyTooLarge, BodyTooSlow, Overloaded, Forbidden.
        """
        ...

    def tell_limits(self, limits: Mapping[str, str]) -> None:
        """Headers about the caller's limits, for the answer that will be started."""
        ...

    async def start(
        self, answer: Answer, decision: Decision, prefill: Decision | None = None
    ) -> None:
        """Begin the client's answer with the instance's status and headers.

        Args:
            answer: the instance's.
            decision: for that instance.
            prefill: for another one, whose prefill leg came before.
        """
        ...

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; raises ClientGone."""
        ...

    def wire(self) -> Wire | None:
        """Where chunks can go as they come, once the answer has begun; None: through `write`."""
        ...

    async def finish(self) -> None:
        """End the answer; raises ClientGone."""
        ...

    async def break_off(self, error: RouterError) -> None:
        """End an answer that cannot be completed so that the client notices."""
        ...
