"""What has been tried for one request, and what comes next. Pure but for what it remembers."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from indexer.contract.identifiers import InstanceId
from indexer.contract.waits import Wait
from router.attempt import FAILED_LOAD, Attempt, Question, refused
from router.eligibility import without
from router.errors import NoEligibleInstance, UpstreamCause, UpstreamFailed
from router.instances.continuation import ContinuedStream
from router.legs import Leg, leg_at
from router.requests.api_call import ApiCall
from router.requests.parting import decode_call, prefill_call
from router.snapshot import Booking, Decision, FleetSnapshot

PUSHBACKS_TRIED_ELSEWHERE: Final = 1
"""Where two will take no more, the client should hear of it rather than the others."""

UNTOUCHED: Final = frozenset({UpstreamCause.CONNECT, UpstreamCause.CONNECT_TIMEOUT})
"""A decode leg that failed so has not reached its engine.

Any other may have taken what is held for it; vLLM has it let go even for a request it refuses.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchBounds:
    """How much is done for one request.

    Attributes:
        retries_max: further instances asked before the first byte, for all its legs together.
        total_timeout_s: from the first dispatch to the last byte of the answer.
        continue_streams: another instance goes on with a stream that broke, see `continuation`.
        handover_kept_s: how long an engine certainly holds what it has prefilled for another one.
    """

    retries_max: int
    total_timeout_s: float
    continue_streams: bool = False
    handover_kept_s: float = 20.0


class Course:
    """One request on its way over instances.

    Args:
        question: its first leg.
        bounds: of what is done for it.
        stream: where events go, if another instance may go on with a stream that broke.
    """

    def __init__(
        self, question: Question, bounds: DispatchBounds, stream: ContinuedStream | None
    ) -> None:
        self.first = question
        self.leg = question
        """The leg that is due."""
        self.stream = stream
        self.goes_on = False
        """A part of the answer has come from another instance."""
        self.failed: set[InstanceId] = set()
        self._avoided: set[InstanceId] = set()
        self._lost_at: set[InstanceId] = set()
        self._kept_s = bounds.handover_kept_s
        self._retries_left = bounds.retries_max
        self._pushbacks_left = PUSHBACKS_TRIED_ELSEWHERE

    @property
    def candidates(self) -> FleetSnapshot:
        """Who has not failed the request; of those whose hold was lost only if nobody else is left.

        Raises:
            NoEligibleInstance: all have.
        """
        snapshot = _less(self.leg.snapshot, self.failed)
        try:
            return _less(snapshot, self._avoided)
        except NoEligibleInstance:
            return snapshot

    def attempt(
        self, decision: Decision, booking: Booking, *, sent_s: float, total: Wait
    ) -> Attempt:
        """The leg that is due, on the chosen instance."""
        leg = leg_at(self.leg.leg, decision)
        return Attempt(
            question=self.leg,
            leg=leg,
            call=self._call(leg, decision),
            stream=self.stream,
            goes_on=self.goes_on,
            decision=decision,
            booking=booking,
            sent_s=sent_s,
            total=total,
            refuses=self._refuses(leg),
        )

    def _call(self, leg: Leg, decision: Decision) -> ApiCall:
        if leg is Leg.PREFILL:
            return prefill_call(self.leg.call)
        if self.leg.handover is not None:
            return decode_call(self.leg.call, _params(self.leg))
        if self.stream is not None:
            return self.stream.next_call(decision.instance.instance_id)
        return self.leg.call

    def _refuses(self, leg: Leg) -> frozenset[int]:
        """Statuses of which the client does not hear, because another instance is asked."""
        if self._retries_left == 0:
            return frozenset()
        handed = leg is Leg.DECODE and _params(self.leg) is not None
        lost = {FAILED_LOAD} if handed else set()
        if len(self.candidates.instances) == 1:
            return frozenset(lost)
        return refused(self._pushbacks_left) | lost

    def decodes(self, decoding: Question) -> None:
        """The prefill leg has its answer; this is the next leg, if anybody is left for it."""
        self.leg = decoding
        if not self._has_candidates():
            self.answers_whole()

    def answers_whole(self) -> None:
        """Nobody is left who decodes: one of those who prefill does all of it."""
        self.leg = self.first = replace(self.first, leg=Leg.WHOLE)

    def failed_at(self, attempt: Attempt, error: UpstreamFailed, now_s: float) -> bool:
        """An attempt failed; whether there is another one to make.

        Behind a failed decode leg what the prefill leg holds is used again where no engine can have
        begun to take it and it is certainly still there; else the request begins anew. Where nobody
        else decodes it begins anew as a whole.
        """
        if self._retries_left == 0 or not (error.retryable or self.goes_on):
            return False
        self._retries_left -= 1
        self._pushbacks_left -= error.cause is UpstreamCause.PUSHBACK
        handover = self.leg.handover
        if handover is not None and error.cause is UpstreamCause.TRANSFER:
            self.leg = self.first
            self._avoid(handover.instance_id)  # which is missing, not the one that said so
            decoder = attempt.decision.instance.instance_id
            if decoder in self._lost_at:  # two holders at once are not: it is the one that says so
                self.failed.add(decoder)
            self._lost_at.add(decoder)
            return self._has_candidates()
        self.failed.add(attempt.decision.instance.instance_id)
        if handover is not None and not self._has_candidates():
            self.answers_whole()
        elif handover is not None and handover.params is not None:
            held = error.cause in UNTOUCHED and now_s - handover.given_s <= self._kept_s
            self.leg = self.leg if held else self.first
        return self._has_candidates()

    def _avoid(self, instance_id: InstanceId) -> None:
        """Of all that were avoided, if nobody else is left, only the last one still is."""
        self._avoided.add(instance_id)
        try:
            _less(self.leg.snapshot, self.failed | self._avoided)
        except NoEligibleInstance:
            self._avoided = {instance_id}

    def _has_candidates(self) -> bool:
        try:
            return bool(self.candidates.instances)
        except NoEligibleInstance:
            return False


def _params(leg: Question) -> bytes | None:
    return None if leg.handover is None else leg.handover.params


def _less(snapshot: FleetSnapshot, excluded: AbstractSet[InstanceId]) -> FleetSnapshot:
    return without(snapshot, excluded) if excluded else snapshot
