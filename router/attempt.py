"""One instance's turn at a request, and which of its answers are none. Pure."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from indexer.contract.milestones import Milestones
from indexer.contract.waits import Wait
from router.awaiting import PrefillEnd
from router.detector import Detection
from router.errors import UpstreamCause, UpstreamFailed
from router.index.known_fleets import ServedModel
from router.instances.answer import Answer
from router.instances.continuation import ContinuedStream
from router.legs import Handover, Leg
from router.policies.base import Policy
from router.requests.api_call import ApiCall
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView

FAILED_STATUSES: Final = frozenset({500, 502, 504})
"""An instance that says this is in trouble."""

RETRIED_STATUSES: Final = frozenset({502, 504})
"""And of these it has not begun; behind a 500 may be what the request itself does to an engine."""

PUSHBACK_STATUSES: Final = frozenset({429, 503})
"""An instance that says this is well, and takes no more now. Another one may."""

FAILED_LOAD: Final = 500
"""A decoding instance says this when it cannot have what another one has prefilled for it."""

DONE_MARK: Final = b"[DONE]"
"""Last of an OpenAI stream."""

DONE_MARKED: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Endpoints whose streams end with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request, or its next leg, and everything its decision rests on.

    Attributes:
        call: as the client sent it.
        policy: scores the instances.
        served: the model.
        hashes: the prompt's chain of canonical block hashes.
        milestones: of the prompt, for siblings in flight.
        view: what a policy sees of it.
        snapshot: who may be chosen.
        prefill_end: what tells it.
        leg: PREFILL may turn out as WHOLE, by who is chosen (`legs.leg_at`).
        handover: of a decode leg: what the prefill leg has left.
        detection: of its class; None: nobody looks for classes.
    """

    call: ApiCall
    policy: Policy
    served: ServedModel
    hashes: bytes
    milestones: Milestones | None
    view: RequestView
    snapshot: FleetSnapshot
    prefill_end: PrefillEnd
    leg: Leg = Leg.WHOLE
    handover: Handover | None = None
    detection: Detection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A request on one instance.

    Attributes:
        question: the request, or its leg.
        leg: what the instance does for it.
        call: what the instance is asked.
        stream: where its events go, if another instance may go on with them.
        goes_on: a part of the answer has come from another instance.
        decision: the instance, and why.
        booking: of the request there.
        sent_s: monotonic time of the dispatch.
        total: the time in which the answer has to be complete.
        refuses: statuses of which the client does not hear, because another instance is asked.
    """

    question: Question
    leg: Leg
    call: ApiCall
    stream: ContinuedStream | None
    goes_on: bool
    decision: Decision
    booking: Booking
    sent_s: float
    total: Wait
    refuses: frozenset[int]


def refused(pushbacks_left: int) -> frozenset[int]:
    """Statuses for which another instance is asked, if there is one."""
    return RETRIED_STATUSES | PUSHBACK_STATUSES if pushbacks_left > 0 else RETRIED_STATUSES


def refuse(attempt: Attempt, answer: Answer) -> None:
    """An answer that is no answer yet, as long as another instance can be asked."""
    instance_id = attempt.decision.instance.instance_id
    stream = answer.event_stream and answer.status == HTTPStatus.OK
    if answer.status in attempt.refuses or (attempt.goes_on and not stream):
        raise UpstreamFailed(
            instance_id,
            f"The instance answered {answer.status}.",
            before_first_byte=True,
            cause=cause_of(attempt, answer.status),
        )
    if stream and attempt.leg is Leg.DECODE and FAILED_LOAD in attempt.refuses:
        _refuse_failed_load(attempt, answer)
    if stream and not answer.first:
        raise UpstreamFailed(
            instance_id,
            f"The instance {instance_id} ended its stream before it had begun. Try again.",
            before_first_byte=True,
            cause=UpstreamCause.TRUNCATED,
        )


def _refuse_failed_load(attempt: Attempt, answer: Answer) -> None:
    """A stream that says at once that its engine could not have what was prefilled for it."""
    event, ended, _ = answer.first.partition(b"\n\n")
    if not ended or not event.startswith(b'data: {"error"'):
        return
    try:
        code = json.loads(event.removeprefix(b"data: "))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return
    if code == FAILED_LOAD:
        raise UpstreamFailed(
            attempt.decision.instance.instance_id,
            f"The instance answered {code} in its stream.",
            before_first_byte=True,
            cause=UpstreamCause.TRANSFER,
        )


def cause_of(attempt: Attempt, status: int) -> UpstreamCause:
    """What a refusing or failing status means."""
    if status in PUSHBACK_STATUSES:
        return UpstreamCause.PUSHBACK
    lost = attempt.leg is Leg.DECODE and status == FAILED_LOAD
    return UpstreamCause.TRANSFER if lost else UpstreamCause.STATUS


def refuse_truncated(attempt: Attempt, answer: Answer) -> None:
    """A stream that ends as if it were complete, without the mark of its end."""
    marked = answer.status == HTTPStatus.OK and attempt.question.call.endpoint in DONE_MARKED
    readable = answer.event_stream and not answer.encoded
    if readable and marked and DONE_MARK not in answer.end():
        instance_id = attempt.decision.instance.instance_id
        raise UpstreamFailed(
            instance_id,
            f"The instance {instance_id} ended its stream before its end. Try again.",
            before_first_byte=False,
            cause=UpstreamCause.TRUNCATED,
        )
