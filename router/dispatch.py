"""A request on its way to instances: which failure is tried elsewhere, and which is the answer."""

import asyncio
import time
from http import HTTPStatus
from typing import Final

from indexer.contract.identifiers import InstanceId
from indexer.contract.waits import Wait, Waits
from router import telemetry
from router.attempt import (
    FAILED_STATUSES,
    PUSHBACK_STATUSES,
    Attempt,
    Question,
    cause_of,
    refuse,
    refuse_truncated,
)
from router.choosing import Chooser
from router.course import Course, DispatchBounds
from router.errors import NoEligibleInstance, UpstreamCause, UpstreamFailed
from router.exchange import Exchange
from router.index.held_responses import HeldResponses
from router.instances.answer import Answer
from router.instances.continuation import ContinuedStream
from router.instances.ejections import Ejections
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.legs import Handover, Leg
from router.policies.base import tell_ended
from router.predictions import Predictions
from router.prefill_costs import PrefillCosts
from router.request_record import RequestRecord, Stage
from router.requests.api_call import Cost
from router.requests.parting import params_of

HANDOVER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a prefill leg's answer: block ids of millions of tokens."""


class Dispatcher:
    """Steps 6 to 9 of a request, on one instance after the other.

    Args:
        chooser: chooses and books.
        ledger: ends the prefill and the reservation.
        upstream: to the instances.
        predictions: compares them with what engines report.
        ejections: is told who failed, and who did not.
        bounds: of what is done for one request.
        prefill_costs: learns how long prefills take.
        responses: learns who holds which answer; None: nobody asks.
    """

    def __init__(
        self,
        *,
        chooser: Chooser,
        ledger: Ledger,
        upstream: Upstream,
        predictions: Predictions,
        ejections: Ejections,
        bounds: DispatchBounds,
        prefill_costs: PrefillCosts,
        responses: HeldResponses | None = None,
    ) -> None:
        self._chooser = chooser
        self._ledger = ledger
        self._upstream = upstream
        self._predictions = predictions
        self._ejections = ejections
        self._bounds = bounds
        self._prefill_costs = prefill_costs
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
        stream = None
        if self._bounds.continue_streams and question.leg is Leg.WHOLE:
            stream = ContinuedStream.of(question.call, exchange)
        course = Course(question, self._bounds, stream)
        while True:
            decision, booking = await self._chooser.book(  # 6, 7
                course.leg, course.candidates, course.failed, record
            )
            leg, sent_s = course.leg, time.monotonic()
            try:
                attempt = course.attempt(decision, booking, sent_s=sent_s, total=total)
                handover = await self._try(attempt, exchange, record)  # 8, 9
            except UpstreamFailed as error:
                self._note_failure(attempt, error, exchange, record)
                if not error.retryable:
                    course.goes_on = _goes_on(stream, error)
                again = course.failed_at(attempt, error, time.monotonic())
                if total.expired or not again:
                    raise
                telemetry.RETRIES.labels(cause=error.cause).inc()
                record.retries_count += 1
                continue
            finally:
                self._ledger.release(booking)
                tell_ended(leg.policy, leg.view, decision)
            if handover is None:
                return
            try:
                course.decodes(await self._chooser.decode_leg(question, handover, record))
            except NoEligibleInstance:  # those who decode have gone meanwhile
                course.answers_whole()

    def _note_failure(
        self, attempt: Attempt, error: UpstreamFailed, exchange: Exchange, record: RequestRecord
    ) -> None:
        if not exchange.started:
            record.lap(Stage.FAILED)
        telemetry.UPSTREAM_FAILURES.labels(cause=error.cause).inc()
        self._ejections.failed(attempt.decision.instance, attempt.sent_s, error.cause)
        if attempt.leg is not Leg.WHOLE:
            telemetry.LEGS.labels(leg=attempt.leg, result="failed").inc()

    async def _try(
        self, attempt: Attempt, exchange: Exchange, record: RequestRecord
    ) -> Handover | None:
        """Steps 8 and 9 on one instance; what it hands over, if the answer is another one's."""
        instance, handover = attempt.decision.instance, None
        try:
            answer = await self._upstream.open(instance, attempt.call)
            try:
                refuse(attempt, answer)
                if attempt.leg is Leg.PREFILL and answer.status == HTTPStatus.OK:
                    handover = await self._take_over(attempt, answer, record)
                else:
                    await self._pass_on(attempt, answer, exchange, record)
            finally:
                self._upstream.close(answer)
        except asyncio.CancelledError:
            if not attempt.total.over:
                raise
            raise self._incomplete(instance.instance_id, exchange) from None
        if answer.status in FAILED_STATUSES:  # passed on all the same: it is the last word
            cause = cause_of(attempt, answer.status)
            telemetry.UPSTREAM_FAILURES.labels(cause=cause).inc()
            self._ejections.failed(instance, attempt.sent_s, cause)
            return None
        if attempt.leg is Leg.DECODE:
            telemetry.LEGS.labels(leg=Leg.DECODE, result="ok").inc()
        if answer.status not in PUSHBACK_STATUSES:
            self._ejections.served(instance, attempt.sent_s)
        return handover

    def _incomplete(self, instance_id: InstanceId, exchange: Exchange) -> UpstreamFailed:
        return UpstreamFailed(
            instance_id,
            f"The answer was not complete after {self._bounds.total_timeout_s:g} s. Ask for "
            "fewer tokens, or raise the router's total_timeout_s.",
            before_first_byte=not exchange.started,
            cause=UpstreamCause.TOTAL_TIMEOUT,
        )

    async def _take_over(self, attempt: Attempt, answer: Answer, record: RequestRecord) -> Handover:
        """The answer of a prefill leg, of which the client sees nothing."""
        self._note_begun(attempt, answer, record)
        body = await self._upstream.collect(answer, HANDOVER_BYTES_MAX)
        record.lap(Stage.PREFILL)
        params = None if body is None else params_of(body)
        telemetry.LEGS.labels(leg=Leg.PREFILL, result="empty" if params is None else "ok").inc()
        record.cached_tokens = answer.cached_tokens()
        self._settle(attempt, answer, record)
        return Handover(decision=attempt.decision, params=params, given_s=time.monotonic())

    async def _pass_on(
        self, attempt: Attempt, answer: Answer, exchange: Exchange, record: RequestRecord
    ) -> None:
        question, booking = attempt.question, attempt.booking
        record.status = answer.status
        record.lap(Stage.FIRST_BYTE)
        begun = answer.event_stream or answer.switched
        if begun and question.prefill_end.first_byte_tells:
            self._ledger.prefilled(booking)
        self._note_begun(attempt, answer, record)
        if answer.status == HTTPStatus.OK:
            if question.call.keeps_answer and self._responses is not None:
                beginning = b"" if answer.encoded else answer.first
                fleet_id = attempt.decision.snapshot.fleet.fleet_id
                self._responses.learn(beginning, fleet_id, answer.instance.instance_id)
        elif answer.status == HTTPStatus.NOT_FOUND and question.call.names_response is not None:
            telemetry.RESPONSES_MISSING.inc()
        if attempt.stream is not None and answer.event_stream:
            answer.forget_length()
        if not attempt.goes_on:
            handover = question.handover
            await exchange.start(
                answer, attempt.decision, None if handover is None else handover.decision
            )
        try:
            await self._upstream.relay(answer, attempt.stream or exchange)
            refuse_truncated(attempt, answer)
            if attempt.stream is not None:
                await attempt.stream.finish()
            await exchange.finish()
        finally:
            record.lap(Stage.ANSWER)
            self._note_end(attempt, answer, record)

    def _note_begun(self, attempt: Attempt, answer: Answer, record: RequestRecord) -> None:
        """The first byte is here."""
        if record.received_s is not None and attempt.leg is not Leg.DECODE:
            record.routing_s = answer.sent_s - record.received_s
        if answer.status not in FAILED_STATUSES:
            self._ejections.answered(attempt.decision.instance)
        if answer.status == HTTPStatus.OK and attempt.leg is not Leg.DECODE:
            self._predictions.computed(attempt.decision, attempt.question.hashes)

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
        if attempt.leg is not Leg.DECODE:  # its hits were handed over
            record.cached_tokens = answer.cached_tokens()
            self._settle(attempt, answer, record)
        if answer.first_out_s is not None:
            record.first_byte_added_s = answer.first_out_s - answer.first_byte_s
            record.ttft_s = answer.first_out_s - record.accepted_s

    def _settle(self, attempt: Attempt, answer: Answer, record: RequestRecord) -> None:
        """What is learned from a prefill: of its hits, and of how long it took."""
        question, decision = attempt.question, attempt.decision
        call = question.call
        self._predictions.settle(call, decision, question.hashes, record)
        streams = answer.event_stream and question.prefill_end.first_byte_tells
        known = call.cost is Cost.PREFILL and call.names_response is None  # how long it is
        if known and answer.status == HTTPStatus.OK and (streams or attempt.leg is Leg.PREFILL):
            told = call.tells_cached_tokens and call.choices_count == 1
            self._prefill_costs.seen(
                decision,
                seconds=answer.first_byte_s - answer.sent_s,
                cached_tokens=record.cached_tokens if told else None,
            )


def _goes_on(stream: ContinuedStream | None, error: UpstreamFailed) -> bool:
    if stream is None or error.before_first_byte:
        return False
    possible = stream.continues_after(error)
    telemetry.CONTINUATIONS.labels(result="begun" if possible else "impossible").inc()
    return possible
