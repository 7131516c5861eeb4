"""One client connection's side of a request: body in, answer out."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from router import headers as names
from router.admission import Ticket
from router.errors import BodyTooLarge, BodyTooSlow, ClientGone, RequestInvalid, RouterError
from router.http.failures import REQUEST_ID, STATUS, error_body, error_type
from router.instances.upstream import Answer
from router.requests.api_call import ApiCall, Endpoint
from router.requests.openai_request import parse
from router.snapshot import Decision

CANDIDATES_SHOWN_MAX: Final = 8
"""A header has to fit into the 8 KiB that clients commonly allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """How large a request body may be, and how long it may take to arrive."""

    bytes_max: int
    timeout_s: float


class HttpExchange:
    """See `exchange.Exchange`.

    Args:
        request: the client's.
        endpoint: where it came in; None: told by its content.
        limits: of its body.
        last: close the connection after the answer, because this router drains.
    """

    def __init__(
        self, request: web.Request, endpoint: Endpoint | None, limits: BodyLimits, *, last: bool
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._limits = limits
        self._last = last
        self._call: ApiCall | None = None
        self._event_stream = False
        self.response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """Whether a part of the answer may have reached the client."""
        return self.response is not None

    async def receive(self, ticket: Ticket) -> ApiCall:
        """Read and check the request."""
        body = await _read_body(self._request, ticket, self._limits)
        self._call = parse(
            body,
            self._request.headers,
            request_id=self._request[REQUEST_ID],
            endpoint=self._endpoint,
        )
        return self._call

    async def start(self, answer: Answer, decision: Decision) -> None:
        """Begin the client's answer with the instance's status and headers."""
        assert self._call is not None
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        response.headers[names.REQUEST_ID] = self._call.request_id
        response.headers[names.INSTANCE] = decision.instance.instance_id
        if self._call.explain:
            view = decision_view(decision, candidates_max=CANDIDATES_SHOWN_MAX)
            response.headers[names.DECISION] = json.dumps(view, separators=(",", ":"))
        if self._last:
            response.force_close()
        self.response = response
        self._event_stream = answer.event_stream
        try:
            await response.prepare(self._request)
        except ConnectionResetError as error:
            raise ClientGone("the client closed its connection") from error

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body."""
        assert self.response is not None
        try:
            await self.response.write(chunk)
        except ConnectionResetError as error:
            raise ClientGone("the client closed its connection") from error

    async def finish(self) -> None:
        """End the answer."""
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionResetError as error:
            raise ClientGone("the client closed its connection") from error

    async def break_off(self, error: RouterError) -> None:
        """Tell the client of a stream in an event; any other client by a connection that breaks."""
        assert self.response is not None
        if self._event_stream and not isinstance(error, ClientGone):
            self.response.force_close()
            event = json.dumps(
                error_body(str(error), error_type(STATUS[error.reason]), error.reason)
            )
            # The empty line in front ends an event that may have been cut in the middle.
            await self.write(b"\n\ndata: " + event.encode() + b"\n\n")
            await self.finish()
        else:
            self.abort()

    def abort(self) -> None:
        """Break the connection if a part of the answer may have reached the client."""
        if self.started and self._request.transport is not None:
            self._request.transport.abort()


async def _read_body(request: web.Request, ticket: Ticket, limits: BodyLimits) -> bytes:
    bytes_max = limits.bytes_max
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestInvalid(
            "Content-Encoding: compressed bodies are not understood; send the body as it is.",
            param="Content-Encoding",
        )
    if (request.content_length or 0) > bytes_max:
        raise BodyTooLarge(bytes_max)
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(limits.timeout_s):
            while chunk := await request.content.readany():
                ticket.hold(len(chunk))
                chunks.append(chunk)
                if ticket.held_bytes > bytes_max:
                    raise BodyTooLarge(bytes_max)
    except TimeoutError:
        raise BodyTooSlow(limits.timeout_s) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RequestInvalid(f"The request body cannot be read: {error}.") from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def decision_view(decision: Decision, *, candidates_max: int | None) -> dict[str, Any]:
    """A decision as clients and operators read it."""
    candidates = [
        {
            "instance_id": one.instance_id,
            "hit_tokens": one.hit_tokens,
            "in_flight_tokens": one.in_flight_tokens,
            "new_prefill_tokens": one.new_prefill_tokens,
            "queued_prefill_tokens": one.queued_prefill_tokens,
            "batch_size": one.batch_size,
            "score": one.score,
        }
        for one in decision.candidates[:candidates_max]
    ]
    return {
        "policy": decision.policy,
        "instance": decision.instance.instance_id,
        "url": decision.instance.url,
        "prompt_tokens": decision.hit_tokens + decision.new_prefill_tokens,
        "hit_tokens": decision.hit_tokens,
        "in_flight_tokens": decision.in_flight_tokens,
        "new_prefill_tokens": decision.new_prefill_tokens,
        "queued_prefill_tokens": decision.queued_prefill_tokens,
        "batch_size": decision.batch_size,
        "score": decision.score,
        "decided_s": decision.decided_s,
        "snapshot_age_s": _rounded(decision.snapshot_age_s),
        "degraded": decision.degraded,
        "degraded_cause": decision.degraded_cause,
        "candidates": candidates,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
