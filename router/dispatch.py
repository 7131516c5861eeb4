"""A request on its way to instances: which failure is tried elsewhere, and which is the answer."""

import asyncio
import time
from collections.abc import Awaitable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

from indexer.contract.identifiers import InstanceId
from indexer.contract.waits import Wait, Waits
from router import telemetry
from router.attempt import (
    FAILED_STATUSES,
    PUSHBACK_STATUSES,
    Attempt,
    Question,
    refuse,
    refuse_truncated,
    refused,
)
from router.eligibility import without
from router.errors import UpstreamCause, UpstreamFailed
from router.exchange import Exchange
from router.index.held_responses import HeldResponses
from router.instances.answer import Answer
from router.instances.continuation import ContinuedStream
from router.instances.ejections import Ejections
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.policies.base import tell_ended
from router.predictions import Predictions
from router.request_record import RequestRecord, Stage
from router.snapshot import Booking, Decision, FleetSnapshot

PUSHBACKS_TRIED_ELSEWHERE: Final = 1
"""Where two will take no more, the client should hear of it rather than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchBounds:
    """How much is done for one request.

    Attributes:
        retries_max: further instances asked before the first byte.
        total_timeout_s: from the first dispatch to the last byte of the answer.
        continue_streams: another instance goes on with a stream that broke, see `continuation`.
    """

    retries_max: int
    total_timeout_s: float
    continue_streams: bool = False


class Reserve(Protocol):
    """Steps 6 and 7: choose and book."""

    def __call__(
        self,
        question: Question,
        snapshot: FleetSnapshot,
        failed: AbstractSet[InstanceId],
        record: RequestRecord,
    ) -> Awaitable[tuple[Decision, Booking]]:
        """Choose one of the snapshot's instances and book the request there."""
        ...


class Dispatcher:
    """Steps 6 to 9 of a request, on one instance after the other.

    Args:
        reserve: chooses and books.
        ledger: ends the prefill and the reservation.
        upstream: to the instances.
        predictions: compares them with what engines report.
        ejections: is told who failed, and who did not.
        bounds: of what is done for one request.
        responses: learns who holds which answer; None: nobody asks.
    """

    def __init__(
        self,
        *,
        reserve: Reserve,
        ledger: Ledger,
        upstream: Upstream,
        predictions: Predictions,
        ejections: Ejections,
        bounds: DispatchBounds,
        responses: HeldResponses | None = None,
    ) -> None:
        self._reserve = reserve
        self._ledger = ledger
        self._upstream = upstream
        self._predictions = predictions
        self._ejections = ejections
        self._bounds = bounds
        self._responses = responses
        self._totals = Waits(bounds.total_timeout_s)

    async def dispatch(self, question: Question, exchange: Exchange, record: RequestRecord) -> None:
        """Answer on another instance as long as nothing has reached the client.

        Behind a part of a stream another one goes on where that was allowed and can be exact.

        Raises:
            RouterError: the last instance failed, or a part of its answer is sent already.
        """
        with self._totals.one() as total:
            try:
                await self._dispatch(question, exchange, record, total)
            except asyncio.CancelledError:
                if not total.over:
                    raise
                raise self._incomplete(InstanceId(record.instance_id or ""), exchange) from None

    async def _dispatch(
        self, question: Question, exchange: Exchange, record: RequestRecord, total: Wait
    ) -> None:
        snapshot = question.snapshot
        failed: set[InstanceId] = set()
        pushbacks_left = PUSHBACKS_TRIED_ELSEWHERE
        stream = (
            ContinuedStream.of(question.call, exchange) if self._bounds.continue_streams else None
        )
        goes_on = False
        for retries_left in range(self._bounds.retries_max, -1, -1):
            last = retries_left == 0 or len(snapshot.instances) == 1
            decision, booking = await self._reserve(question, snapshot, failed, record)  # 6, 7
            instance_id = decision.instance.instance_id
            sent_s = time.monotonic()
            try:
                attempt = Attempt(
                    question=question,
                    call=question.call if stream is None else stream.next_call(instance_id),
                    stream=stream,
                    goes_on=goes_on,
                    decision=decision,
                    booking=booking,
                    sent_s=sent_s,
                    total=total,
                    refuses=frozenset() if last else refused(pushbacks_left),
                )
                await self._try(attempt, exchange, record)  # 8, 9
            except UpstreamFailed as error:
                if not exchange.started:
                    record.lap(Stage.FAILED)
                telemetry.UPSTREAM_FAILURES.labels(cause=error.cause).inc()
                self._ejections.failed(decision.instance, sent_s, error.cause)
                if not error.retryable:
                    goes_on = _goes_on(stream, error)
                if last or total.expired or not (error.retryable or goes_on):
                    raise
                telemetry.RETRIES.labels(cause=error.cause).inc()
                pushbacks_left -= error.cause is UpstreamCause.PUSHBACK
            else:
                return
            finally:
                self._ledger.release(booking)
                tell_ended(question.policy, question.view, decision)
            record.retries_count += 1
            failed.add(instance_id)
            snapshot = without(snapshot, failed)

    async def _try(self, attempt: Attempt, exchange: Exchange, record: RequestRecord) -> None:
        """Steps 8 and 9 on one instance."""
        instance = attempt.decision.instance
        try:
            answer = await self._upstream.open(instance, attempt.call)
            try:
                refuse(attempt, answer)
                await self._pass_on(attempt, answer, exchange, record)
            finally:
                self._upstream.close(answer)
        except asyncio.CancelledError:
            if not attempt.total.over:
                raise
            raise self._incomplete(instance.instance_id, exchange) from None
        if answer.status in FAILED_STATUSES:  # passed on all the same: it is the last word
            telemetry.UPSTREAM_FAILURES.labels(cause=UpstreamCause.STATUS).inc()
            self._ejections.failed(instance, attempt.sent_s, UpstreamCause.STATUS)
        elif answer.status not in PUSHBACK_STATUSES:
            self._ejections.served(instance, attempt.sent_s)

    def _incomplete(self, instance_id: InstanceId, exchange: Exchange) -> UpstreamFailed:
        return UpstreamFailed(
            instance_id,
            f"The answer was not complete after {self._bounds.total_timeout_s:g} s. Ask for "
            "fewer tokens, or raise the router's total_timeout_s.",
            before_first_byte=not exchange.started,
            cause=UpstreamCause.TOTAL_TIMEOUT,
        )

    async def _pass_on(
        self, attempt: Attempt, answer: Answer, exchange: Exchange, record: RequestRecord
    ) -> None:
        question, booking = attempt.question, attempt.booking
        record.status = answer.status
        record.lap(Stage.FIRST_BYTE)
        if record.received_s is not None:
            record.routing_s = answer.sent_s - record.received_s
        if answer.event_stream and question.prefill_end.first_byte_tells:
            self._ledger.prefilled(booking)
        if answer.status not in FAILED_STATUSES:
            self._ejections.answered(attempt.decision.instance)
        if answer.status == HTTPStatus.OK:
            self._predictions.computed(attempt.decision, question.hashes)
            if question.call.keeps_answer and self._responses is not None:
                beginning = b"" if answer.encoded else answer.first
                fleet_id = attempt.decision.snapshot.fleet.fleet_id
                self._responses.learn(beginning, fleet_id, answer.instance.instance_id)
        elif answer.status == HTTPStatus.NOT_FOUND and question.call.names_response is not None:
            telemetry.RESPONSES_MISSING.inc()
        if attempt.stream is not None and answer.event_stream:
            answer.forget_length()
        if not attempt.goes_on:
            await exchange.start(answer, attempt.decision)
        try:
            await self._upstream.relay(answer, attempt.stream or exchange)
            refuse_truncated(attempt, answer)
            if attempt.stream is not None:
                await attempt.stream.finish()
            await exchange.finish()
        finally:
            record.lap(Stage.ANSWER)
            self._note_end(attempt, answer, record)

    def _note_end(self, attempt: Attempt, answer: Answer, record: RequestRecord) -> None:
        if answer.event_stream and attempt.question.prefill_end.first_byte_tells:
            decode_s = time.monotonic() - answer.first_byte_s
            tell_ended(attempt.question.policy, attempt.question.view, attempt.decision, decode_s)
        record.output_bytes += answer.output_bytes
        record.output_tokens = answer.output_tokens()
        if attempt.goes_on:  # its usage is of a longer prompt, and the first byte was another's
            if attempt.stream is not None and record.output_tokens is not None:
                record.output_tokens += attempt.stream.earlier_tokens
            return
        record.cached_tokens = answer.cached_tokens()
        question = attempt.question
        self._predictions.settle(question.call, attempt.decision, question.hashes, record)
        if answer.first_out_s is not None:
            record.first_byte_added_s = answer.first_out_s - answer.first_byte_s
            record.ttft_s = answer.first_out_s - record.accepted_s


def _goes_on(stream: ContinuedStream | None, error: UpstreamFailed) -> bool:
    if stream is None or error.before_first_byte:
        return False
    possible = stream.continues_after(error)
    telemetry.CONTINUATIONS.labels(result="begun" if possible else "impossible").inc()
    return possible
