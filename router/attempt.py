"""One instance's turn at a request, and which of its answers are none. Pure."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from indexer.contract.milestones import Milestones
from indexer.contract.waits import Wait
from router.awaiting import PrefillEnd
from router.errors import UpstreamCause, UpstreamFailed
from router.index.known_fleets import ServedModel
from router.instances.answer import Answer
from router.instances.continuation import ContinuedStream
from router.policies.base import Policy
from router.requests.api_call import ApiCall
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView

FAILED_STATUSES: Final = frozenset({500, 502, 504})
"""An instance that says this is in trouble."""

RETRIED_STATUSES: Final = frozenset({502, 504})
"""And of these it has not begun; behind a 500 may be what the request itself does to an engine."""

PUSHBACK_STATUSES: Final = frozenset({429, 503})
"""An instance that says this is well, and takes no more now. Another one may."""

DONE_MARK: Final = b"[DONE]"
"""Last of an OpenAI stream."""

DONE_MARKED: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Endpoints whose streams end with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request and everything its decision rests on."""

    call: ApiCall
    policy: Policy
    served: ServedModel
    hashes: bytes
    milestones: Milestones | None
    view: RequestView
    snapshot: FleetSnapshot
    prefill_end: PrefillEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A request on one instance.

    Attributes:
        question: the request.
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
        pushback = answer.status in PUSHBACK_STATUSES
        raise UpstreamFailed(
            instance_id,
            f"The instance answered {answer.status}.",
            before_first_byte=True,
            cause=UpstreamCause.PUSHBACK if pushback else UpstreamCause.STATUS,
        )
    if stream and not answer.first:
        raise UpstreamFailed(
            instance_id,
            f"The instance {instance_id} ended its stream before it had begun. Try again.",
            before_first_byte=True,
            cause=UpstreamCause.TRUNCATED,
        )


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
