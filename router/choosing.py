"""Steps 4 to 7 of a request: look, who may be chosen, choose and book."""

import asyncio
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from indexer.contract.identifiers import InstanceId
from indexer.contract.milestones import Milestones
from indexer.contract.request_classes import ClassPrefixes
from router import telemetry
from router.asked_instances import among_asked, asked_instances
from router.attempt import Question
from router.decide import decide
from router.decode_leg import DECODE_LEG
from router.detector import Detection
from router.eligibility import Sighting, eligible_snapshot, without
from router.errors import DegradedCause, IndexUnavailable, NoEligibleInstance
from router.hold import Hold
from router.index.index_client import IndexClient
from router.index.known_fleets import ServedModel
from router.instances.ejections import Ejections
from router.ledger import Ledger
from router.legs import Handover, Leg, handed_over, leg_at, pool
from router.policies.base import tell_decided
from router.prefill_costs import PrefillCosts
from router.request_record import RequestRecord, Stage
from router.requests.api_call import ApiCall, Cost
from router.requests.parting import decodes
from router.snapshot import Booking, Decision, FleetSnapshot

SHORT_PREFILL_S: Final = 0.1
"""After so long less than a block is computed: as late as a sidecar would tell."""


class Chooser:
    """Chooses an instance for each leg of a request and books it there.

    Args:
        index: snapshots.
        ledger: reservations.
        ejections: instances left out for a while.
        prefill_costs: what prefill takes.
    """

    def __init__(
        self,
        *,
        index: IndexClient,
        ledger: Ledger,
        ejections: Ejections,
        prefill_costs: PrefillCosts,
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._ejections = ejections
        self._prefill_costs = prefill_costs

    async def look(
        self,
        served: ServedModel,
        hashes: bytes,
        milestones: Milestones | None,
        record: RequestRecord,
        prefixes: ClassPrefixes | None = None,
    ) -> Sighting:
        """One lookup, one read; the last known fleet where the index does not answer.

        Raises:
            IndexUnavailable: and there is none.
        """
        try:
            return await self._index.look(served, hashes, milestones, prefixes)
        except IndexUnavailable as error:  # the last known fleet will do, if there is one
            sighting = self._index.last_sighting(served)
            degrade(record, error.cause)
            return replace(sighting, degraded_cause=error.cause)

    def eligible(
        self, sighting: Sighting, prompt_tokens: int, *, approximate: bool
    ) -> FleetSnapshot:
        """See `eligible_snapshot`; with what prefill costs there, as far as that is known.

        Raises:
            NoEligibleInstance: nobody is.
        """
        cost = self._prefill_costs.of(sighting.fleet.model_scope)
        return eligible_snapshot(
            sighting, prompt_tokens, approximate=approximate, prefill_cost=cost
        )

    def candidates(self, eligible: FleetSnapshot, leg: Leg, call: ApiCall) -> FleetSnapshot:
        """Those of the eligible who may be chosen for this leg, and have not failed lately.

        Raises:
            NoEligibleInstance: nobody is left.
            RequestInvalid: the request names instances, and not as it should.
        """
        eligible = among_asked(eligible, asked_instances(call.asked_instances))
        if call.cost is not Cost.NONE:
            eligible = pool(eligible, leg, decodes=decodes(call))
        return self.spared(eligible)

    def spared(self, eligible: FleetSnapshot) -> FleetSnapshot:
        """Those of the eligible who have not failed lately, whatever they are for."""
        return self._ejections.spared(eligible)

    async def decode_leg(
        self, question: Question, handover: Handover, record: RequestRecord
    ) -> Question:
        """The question of who decodes, by the counters of now.

        Raises:
            NoEligibleInstance: nobody.
            IndexUnavailable: nobody knows.
        """
        decoding = replace(
            question, leg=Leg.DECODE, policy=DECODE_LEG, handover=handover, detection=None
        )
        if handover.params is not None:
            end = replace(question.prefill_end, hashes=b"", hashed_tokens=0, prompt_tokens=1)
            # Nothing to compute, so nobody has to hold anything.
            decoding = replace(decoding, hashes=b"", milestones=None, prefill_end=end)
        snapshot = await self._look_again(decoding, record)
        record.lap(Stage.LOOK)
        return replace(decoding, snapshot=snapshot)

    async def book(
        self,
        question: Question,
        snapshot: FleetSnapshot,
        failed: AbstractSet[InstanceId],
        record: RequestRecord,
    ) -> tuple[Decision, Booking]:
        """Steps 6 and 7, noted, and with somebody to say when the prefill has ended."""
        # A retry takes whom it can get, and is the same request, counted already.
        detection = None if record.decisions else question.detection
        decision, booking = await self._reserve(question, snapshot, failed, record, detection)
        leg = leg_at(question.leg, decision)
        record.note(decision, leg)
        if decision.hot_class is not None and decision.hot_class.taken_out:
            telemetry.STEERED.labels(fleet=snapshot.fleet.model_scope).inc()
        if question.call.cost is not Cost.NONE:
            tell_decided(question.policy, question.view, decision)
        if leg is not Leg.PREFILL:  # that one ends with its answer, and is released then
            self._await_prefill(question, decision, booking)
        return decision, booking

    async def hold(self, question: Question, record: RequestRecord) -> Hold:
        """Book it for somebody else to send; raises as `book`."""
        decision, booking = await self.book(question, question.snapshot, frozenset(), record)
        return Hold(question=question, decision=decision, booking=booking, ledger=self._ledger)

    async def _reserve(
        self,
        question: Question,
        snapshot: FleetSnapshot,
        failed: AbstractSet[InstanceId],
        record: RequestRecord,
        detection: Detection | None,
    ) -> tuple[Decision, Booking]:
        if question.call.cost is Cost.NONE:
            return self._ledger.unbooked(question.policy, question.view, snapshot)
        for look_again in (True, False):
            if snapshot.degraded:
                break
            try:
                return await self._ledger.reserve(
                    question.policy,
                    question.view,
                    snapshot if detection is None else detection.candidates(snapshot),
                    question.milestones,
                    detection,
                )
            except NoEligibleInstance:  # whoever was seen has gone; others may have come
                if not look_again:
                    raise
                snapshot = without(await self._look_again(question, record), failed)
                if detection is not None:  # what it says is of those who were seen before
                    detection = Detection(prefixes=detection.prefixes)
            except IndexUnavailable:  # Redis learns of it later
                degrade(record, DegradedCause.LEDGER_UNAVAILABLE)
                break
        return self._ledger.reserve_alone(question.policy, question.view, snapshot)

    async def _look_again(self, question: Question, record: RequestRecord) -> FleetSnapshot:
        """Who may be chosen by now."""
        sighting = await self.look(question.served, question.hashes, question.milestones, record)
        eligible = self.eligible(
            sighting, question.view.prompt_tokens, approximate=question.snapshot.approximate
        )
        snapshot = self.candidates(eligible, question.leg, question.call)
        if question.handover is None or question.handover.params is None:
            return snapshot
        return handed_over(snapshot, question.view.prompt_tokens)

    def _await_prefill(self, question: Question, decision: Decision, booking: Booking) -> None:
        """A first byte that comes too late tells nothing; the sidecar sees the prefill end."""
        if question.prefill_end.first_byte_tells:
            return
        awaited = question.prefill_end.awaited(decision, booking)
        if awaited is None:  # fewer tokens than a block; they must not vanish within a burst
            loop = asyncio.get_running_loop()
            loop.call_later(SHORT_PREFILL_S, self._ledger.prefilled, booking)
        else:
            self._ledger.awaits(booking, awaited)


def degrade(record: RequestRecord, cause: DegradedCause) -> None:
    """A decision goes on without something; counted here and nowhere else."""
    telemetry.DEGRADED.labels(cause=cause).inc()
    record.degraded, record.degraded_cause = True, record.degraded_cause or cause


def explained(question: Question) -> Decision:
    """The decision by what was seen, with nothing booked."""
    snapshot, detection = question.snapshot, question.detection
    if detection is None:
        return decide(question.policy, question.view, snapshot)
    snapshot = detection.candidates(snapshot)
    hot_class = detection.noted(snapshot)
    return decide(question.policy, question.view, snapshot, hot_class=hot_class)
