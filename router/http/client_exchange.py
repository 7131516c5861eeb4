"""One client connection's side of a request: body in, answer out."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from indexer.contract.waits import Waits
from router import headers as names
from router.door.admission import Ticket
from router.door.engine_headers import EngineHeaders
from router.door.visitor import Visitor
from router.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    Forbidden,
    RequestInvalid,
    RouterError,
)
from router.http.client_connection import ClientConnection
from router.http.dashboard.explanation import hot_class_view
from router.http.dialects import error_event
from router.http.failures import REQUEST_ID, STATUS, set_cors_headers
from router.http.gate import VISITOR
from router.http.usage_filter import UsageFilter
from router.http.websocket import Switching, hear
from router.instances.answer import Answer
from router.requests.api_call import ApiCall
from router.requests.endpoints import Endpoint, parse, refuse_climbing
from router.requests.rewriting import Rewriting
from router.snapshot import Decision

PARSE_IN_THREAD_BYTES: Final = 64 * 1024
"""A larger body is read in a thread: other requests go on between its steps."""

CANDIDATES_SHOWN_MAX: Final = 8
"""A header has to fit into the 8 KiB that clients commonly allow."""

_NO_MODEL: Final = (
    "This key is for some models only, and no `model` of this request can be read here: name one "
    "of them. GET /v1/models lists them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Bounds of bodies.

    Attributes:
        bytes_max: of a request's.
        arrival: time for a request's to arrive.
        unread: time for the client to take the end of an answer's.
    """

    bytes_max: int
    arrival: Waits
    unread: Waits


class HttpExchange:
    """See `exchange.Exchange`.

    Args:
        request: the client's.
        endpoint: where it came in.
        limits: of its body, and of the answer's.
        rewriting: what the operator lets be changed in it.
        engine_headers: what the instance sees of the client's credentials.
        last: close the connection after the answer, because this router drains.
    """

    def __init__(
        self,
        request: web.Request,
        endpoint: Endpoint,
        limits: BodyLimits,
        rewriting: Rewriting,
        engine_headers: EngineHeaders,
        *,
        last: bool,
    ) -> None:
        self._request = request
        self._endpoint = endpoint
        self._limits = limits
        self._rewriting = rewriting
        self._engine_headers = engine_headers
        self._last = last
        self._call: ApiCall | None = None
        self._filter: UsageFilter | None = None
        self._event_stream = False
        self._limit_headers: Mapping[str, str] = {}
        self.response: web.StreamResponse | None = None

    @property
    def visitor(self) -> Visitor:
        """Who asks."""
        return self._request[VISITOR]

    @property
    def started(self) -> bool:
        """Whether a part of the answer may have reached the client."""
        return self.response is not None

    async def receive(self, ticket: Ticket) -> ApiCall:
        """Read and check the request."""
        path = _target(self._request)
        refuse_climbing(path)
        body = await _read_body(self._request, ticket, self._limits)
        if len(body) > PARSE_IN_THREAD_BYTES:
            self._call = await asyncio.to_thread(self._understand, body, path)
        else:
            self._call = self._understand(body, path)
        if self._call.hides_usage:
            self._filter = UsageFilter()
        return self._call

    def _understand(self, body: bytes, path: str) -> ApiCall:
        call = parse(
            self._endpoint,
            body,
            self._engine_headers.of(self._request.headers),
            request_id=self._request[REQUEST_ID],
            method=self._request.method,
            path=path,
        )
        rewritten = self._rewriting.apply(call)
        caller = self.visitor.caller
        placed = not rewritten.model and rewritten.names_response is not None  # by who holds it
        if caller is not None and not placed and not caller.may_use(rewritten.model):
            if not call.model:  # it may be meant where nothing here reads it
                raise Forbidden(_NO_MODEL)
            caller.refuse_model(call.model)  # a key may be for the alias alone
        return rewritten

    def tell_limits(self, limits: Mapping[str, str]) -> None:
        """Headers about the caller's limits."""
        self._limit_headers = limits

    async def start(
        self, answer: Answer, decision: Decision, prefill: Decision | None = None
    ) -> None:
        """Begin the client's answer with the instance's status and headers."""
        assert self._call is not None
        if self._filter is not None and answer.event_stream:
            answer.forget_length()
        kind = Switching if answer.switched else _Answer
        response = kind(status=answer.status, headers=answer.headers)
        response.headers.update(self._limit_headers)
        set_cors_headers(response, self._request)
        response.headers[names.REQUEST_ID] = self._call.request_id
        response.headers[names.INSTANCE] = decision.instance.instance_id
        if prefill is not None:
            response.headers[names.PREFILL_INSTANCE] = prefill.instance.instance_id
        if self._call.explain:
            view = decision_view(decision, candidates_max=CANDIDATES_SHOWN_MAX)
            if prefill is not None:
                view["prefill"] = decision_view(prefill, candidates_max=CANDIDATES_SHOWN_MAX // 2)
            response.headers[names.DECISION] = json.dumps(view, separators=(",", ":"))
        if self._last:
            response.force_close()
        self.response = response
        self._event_stream = answer.event_stream
        try:
            await response.prepare(self._request)
        except ConnectionResetError as error:
            raise ClientGone("the client closed its connection") from error
        if answer.switched:
            hear(self._request, answer.connection)

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body."""
        assert self.response is not None
        if self._filter is not None and self._event_stream:
            chunk = self._filter.passes(chunk)
        try:
            await self.response.write(chunk)
        except ConnectionResetError as error:
            raise ClientGone("the client closed its connection") from error

    def wire(self) -> "ClientWire | None":
        """Where bytes can go as the instance framed them; None where they are changed here."""
        response, transport = self.response, self._request.transport
        assert response is not None
        filtered = self._filter is not None and self._event_stream
        chunked = response.headers.get("Transfer-Encoding") == "chunked"
        switched = isinstance(response, Switching)
        if filtered or not (chunked or switched) or transport is None:
            return None
        return ClientWire(self._request, transport)

    async def finish(self) -> None:
        """End the answer."""
        assert self.response is not None
        rest = self._filter.rest() if self._filter is not None else b""
        unread = self._limits.unread
        try:
            with unread.one():
                await self.response.write_eof(rest)
        except TimeoutError as error:
            raise ClientGone(f"the client read nothing for {unread.length_s:g} s") from error
        except ConnectionResetError as error:
            raise ClientGone("the client closed its connection") from error

    async def break_off(self, error: RouterError) -> None:
        """Tell the client of a stream in an event; any other client by a connection that breaks."""
        assert self.response is not None
        # Behind a told length an event would be cut, and might make the answer look complete.
        open_ended = self._event_stream and self.response.content_length is None
        if open_ended and not isinstance(error, ClientGone):
            self.response.force_close()
            event = error_event(self._request.path, STATUS[error.reason], str(error), error.reason)
            try:
                with self._limits.unread.one():
                    # The empty line in front ends an event that may have been cut in the middle.
                    await self.write(b"\n\n" + event)
                    await self.finish()
            except (ClientGone, TimeoutError):
                self.abort()
            except asyncio.CancelledError:  # also where an earlier wait for the client was given up
                self.abort()
                raise
        else:
            self.abort()

    def abort(self) -> None:
        """Break the connection if a part of the answer may have reached the client."""
        if self.started and self._request.transport is not None:
            self._request.transport.abort()


class _Answer(web.StreamResponse):
    """Its head goes out with the first piece of its body, which is here already: one packet."""

    _send_headers_immediately = False


class ClientWire:
    """The client's socket, behind a chunk that aiohttp has written and before the end it writes.

    Args:
        request: whose answer has begun, in chunks.
        transport: of its connection.
    """

    def __init__(self, request: web.Request, transport: asyncio.Transport) -> None:
        self._request = request
        self._protocol = request.protocol
        self._transport = transport

    def write(self, chunks: bytes) -> bool:
        """Send whole chunks; whether the client reads more slowly than they come.

        A client that has gone takes none, and its handler is cancelled.
        """
        if not self._transport.is_closing():
            self._transport.write(chunks)
        return self.is_full

    @property
    def send(self) -> Callable[[bytes], object]:
        """See `engine_connection.Wire`; this and the next make `write` quick."""
        return self._transport.write

    def on_full(self, full: Callable[[], None] | None) -> None:
        """See `engine_connection.Wire`."""
        assert isinstance(self._protocol, ClientConnection), "there are no others"
        self._protocol.full = full

    @property
    def is_full(self) -> bool:
        """Whether the client reads more slowly than chunks come."""
        return self._protocol.writing_paused

    async def drain(self) -> None:
        """Wait until it has read; raises ClientGone."""
        try:
            # Shielded: aiohttp's next wait would end with this one, if this one were cancelled.
            await asyncio.shield(self._request.writer.drain())
        except ConnectionError as error:
            raise ClientGone("the client closed its connection") from error


def _target(request: web.Request) -> str:
    """Path and query string as they were sent; of a target with a host in front, without it."""
    raw = request.raw_path
    return raw if raw.startswith("/") else request.path_qs


async def _read_body(request: web.Request, ticket: Ticket, limits: BodyLimits) -> bytes:
    bytes_max = limits.bytes_max
    if (request.content_length or 0) > bytes_max:
        raise BodyTooLarge(bytes_max)
    content = request.content
    chunks: list[bytes] = []
    try:
        with limits.arrival.one():
            while chunk := await content.readany():
                ticket.hold(len(chunk))
                chunks.append(chunk)
                if ticket.held_bytes > bytes_max:
                    raise BodyTooLarge(bytes_max)
    except TimeoutError:
        raise BodyTooSlow(limits.arrival.length_s) from None
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
            "tier_tokens": one.tier_tokens,
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
        "prompt_tokens": decision.prompt_tokens,
        "hit_tokens": decision.hit_tokens,
        "in_flight_tokens": decision.in_flight_tokens,
        "tier_tokens": decision.tier_tokens,
        "new_prefill_tokens": decision.new_prefill_tokens,
        "queued_prefill_tokens": decision.queued_prefill_tokens,
        "batch_size": decision.batch_size,
        "score": decision.score,
        "decided_s": decision.decided_s,
        "snapshot_age_s": _rounded(decision.snapshot_age_s),
        "approximate": decision.approximate,
        "degraded": decision.degraded,
        "degraded_cause": decision.degraded_cause,
        "hot_class": hot_class_view(decision.hot_class),
        "candidates": candidates,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
