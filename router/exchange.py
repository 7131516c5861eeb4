"""One request and its answer, as the flow sees the HTTP side."""

from typing import Protocol

from router.admission import Ticket
from router.errors import RouterError
from router.instances.upstream import Answer
from router.requests.api_call import ApiCall
from router.snapshot import Decision


class Exchange(Protocol):
    """One request and its answer, as the HTTP side holds them."""

    @property
    def started(self) -> bool:
        """Whether a part of the answer may have reached the client."""
        ...

    async def receive(self, ticket: Ticket) -> ApiCall:
        """Read and check the request.

        Raises:
            RequestInvalid, BodyTooLarge, BodyTooSlow, Overloaded.
        """
        ...

    async def start(self, answer: Answer, decision: Decision) -> None:
        """Begin the client's answer with the instance's status and headers."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; raises ClientGone."""
        ...

    async def finish(self) -> None:
        """End the answer; raises ClientGone."""
        ...

    async def break_off(self, error: RouterError) -> None:
        """End an answer that cannot be completed so that the client notices."""
        ...
