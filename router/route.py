"""The life of a request, top to bottom. Whatever is decided about failures is decided here."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from indexer.contract import block_hash
from indexer.contract.block_hash import TOKEN_BYTES
from indexer.contract.identifiers import InstanceId
from indexer.contract.limits import BLOCKS_PER_LOOKUP_MAX
from indexer.contract.milestones import Milestones
from router import headers as names
from router import telemetry
from router.admission import Admission
from router.awaiting import last_full_block
from router.decide import decide
from router.eligibility import Sighting, eligible_snapshot, without
from router.errors import (
    DegradedCause,
    DropReason,
    IndexUnavailable,
    ModelUnknown,
    NoEligibleInstance,
    RequestInvalid,
    RouterError,
    TokensUnknown,
    UpstreamFailed,
)
from router.exchange import Exchange
from router.index.index_client import INDEX_SILENCE_MAX_S, IndexClient
from router.index.known_fleets import ServedModel
from router.instances.suspects import Suspects
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.policies.base import Policy
from router.predictions import Predictions
from router.requests.api_call import ApiCall
from router.requests.prompt_limits import refuse_huge, refuse_too_long
from router.snapshot import Booking, Decision, FleetSnapshot, RequestView
from router.telemetry import RequestRecord
from router.tokens.tokenize import EncodedPrompt, Tokenizer, estimate

RETRIED_STATUSES: Final = frozenset({502, 503, 504})
"""An instance that says this has not begun: another one may be able to."""

SHORT_PREFILL_S: Final = 0.1
"""After so long less than a block is computed: as late as a sidecar would tell."""


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
    stores_tell: bool
    """Whether the blocks that its engine stores tell when its prefill has ended."""


class Router:
    """Routes requests. Steps are numbered as in ARCHITECTURE.md, "Life of a request".

    Args:
        admission: the door.
        tokenizer: prompt -> token ids.
        index: models and snapshots.
        ledger: reservations.
        upstream: to the instances.
        predictions: compares them with what engines report.
        policies: all that can be asked for, by name.
        default_policy: for requests that ask for none.
        allow_policy_override: whether a request may ask for one.
        retries_max: further instances asked before the first byte.
        in_flight_credit: count what requests in prefill are about to compute.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        index: IndexClient,
        ledger: Ledger,
        upstream: Upstream,
        predictions: Predictions,
        policies: Mapping[str, Policy],
        default_policy: str,
        allow_policy_override: bool,
        retries_max: int,
        in_flight_credit: bool = True,
    ) -> None:
        assert default_policy in policies, default_policy
        self._admission = admission
        self._tokenizer = tokenizer
        self._index = index
        self._ledger = ledger
        self._upstream = upstream
        self._predictions = predictions
        self._policies = policies
        self._default_policy = default_policy
        self._allow_policy_override = allow_policy_override
        self._retries_max = retries_max
        self._in_flight_credit = in_flight_credit
        self._sequence = itertools.count()
        self._suspects = Suspects()

    async def route(self, exchange: Exchange, record: RequestRecord) -> None:
        """Answer one request.

        Raises:
            RouterError: the answer has not been started; it is the caller's to send.
        """
        try:
            with self._admission.enter() as ticket:  # 1 bounded, else Overloaded
                call = await exchange.receive(ticket)
                record.received_s = time.monotonic()
                question = await self._prepare(call, record)  # 2 - 5
                await self._dispatch(question, exchange, record)  # 6 - 9
            record.outcome = "completed"
        except RouterError as error:
            record.outcome = error.reason
            if not exchange.started:
                raise
            await exchange.break_off(error)
        except asyncio.CancelledError:
            record.outcome = DropReason.CLIENT_GONE
            raise
        finally:
            record.e2e_s = time.monotonic() - record.accepted_s

    async def explain(self, exchange: Exchange, record: RequestRecord) -> Decision:
        """Decide as in `route`, with nothing sent and nothing reserved.

        Raises:
            RouterError: as in `route`.
        """
        with self._admission.enter() as ticket:
            call = await exchange.receive(ticket)
            question = await self._prepare(call, record)
        return decide(question.policy, question.view, question.snapshot)

    async def _prepare(self, call: ApiCall, record: RequestRecord) -> Question:
        """Steps 2 to 5: what the decision rests on."""
        policy = self._policy(call)
        record.model, record.stream, record.policy = call.model, call.stream, policy.name
        record.prompts_count = call.prompts_count
        if call.prompts_count > 1:
            telemetry.MULTI_PROMPT.inc()
        served = await self._served(call.model)
        record.fleet = served.fleet.model_scope

        refuse_huge(served, call)
        prompt = await self._tokens(served, call, record)  # 2 text -> token ids
        record.prompt_tokens = prompt.prompt_tokens
        refuse_too_long(prompt, served, call)
        hashes = _hashes(prompt, served, call)  # 3 token ids -> block hashes
        milestones = self._milestones(served, hashes, prompt)
        sighting = await self._look(served, hashes, milestones, record)  # 4 one lookup, one read
        snapshot = eligible_snapshot(sighting, prompt.prompt_tokens)  # 5 alive, awake, staying
        snapshot = self._suspects.spared(snapshot)
        view = RequestView(
            request_id=call.request_id,
            sequence=next(self._sequence),
            prompt_tokens=prompt.prompt_tokens,
            session_id=call.session_id,
            turn=call.turn,
        )
        return Question(
            call=call,
            policy=policy,
            served=served,
            hashes=hashes,
            milestones=milestones,
            view=view,
            snapshot=snapshot,
            stores_tell=_stores_tell(call, prompt),
        )

    async def _served(self, model: str) -> ServedModel:
        served = await self._index.find(model)
        if served is not None:
            return served
        if self._index.heard_age_s() > INDEX_SILENCE_MAX_S:
            raise IndexUnavailable(
                f"The index (Redis) does not answer, so nobody knows who serves `{model}`. "
                "Try again later."
            )
        if self._index.is_scope(model) or not self._index.models():
            raise NoEligibleInstance(f"No instance of `{model}` is here now. Try again later.")
        raise ModelUnknown(model, list(self._index.models()))

    async def _tokens(
        self, served: ServedModel, call: ApiCall, record: RequestRecord
    ) -> EncodedPrompt:
        try:
            return await self._tokenizer.encode(served, call)
        except TokensUnknown as error:  # without ids there are no hits, but there is an answer
            _degrade(record, error.cause)
            return estimate(call, served.max_model_len_tokens)

    def _milestones(
        self, served: ServedModel, hashes: bytes, prompt: EncodedPrompt
    ) -> Milestones | None:
        if not self._in_flight_credit:
            return None
        return Milestones.of(
            hashes,
            prompt_tokens=prompt.prompt_tokens,
            block_size_tokens=served.fleet.block_size_tokens,
        )

    async def _look(
        self,
        served: ServedModel,
        hashes: bytes,
        milestones: Milestones | None,
        record: RequestRecord,
    ) -> Sighting:
        try:
            return await self._index.look(served, hashes, milestones)
        except IndexUnavailable as error:  # the last known fleet will do, if there is one
            sighting = self._index.last_sighting(served)
            _degrade(record, error.cause)
            return replace(sighting, degraded_cause=error.cause)

    async def _reserve(
        self,
        question: Question,
        snapshot: FleetSnapshot,
        failed: AbstractSet[InstanceId],
        record: RequestRecord,
    ) -> tuple[Decision, Booking]:
        """Steps 6 and 7."""
        for look_again in (True, False):
            if snapshot.degraded:
                break
            try:
                return await self._ledger.reserve(
                    question.policy, question.view, snapshot, question.milestones
                )
            except NoEligibleInstance:  # whoever was seen has gone; others may have come
                if not look_again:
                    raise
                sighting = await self._look(
                    question.served, question.hashes, question.milestones, record
                )
                snapshot = eligible_snapshot(sighting, question.view.prompt_tokens)
                snapshot = self._suspects.spared(without(snapshot, failed))
            except IndexUnavailable:  # Redis learns of it later
                _degrade(record, DegradedCause.LEDGER_UNAVAILABLE)
                break
        return self._ledger.reserve_alone(question.policy, question.view, snapshot)

    async def _dispatch(
        self, question: Question, exchange: Exchange, record: RequestRecord
    ) -> None:
        """Steps 6 to 9, on another instance as long as nothing has reached the client."""
        snapshot = question.snapshot
        failed: set[InstanceId] = set()
        for retries_left in range(self._retries_max, -1, -1):
            last = retries_left == 0 or len(snapshot.instances) == 1
            decision, booking = await self._reserve(question, snapshot, failed, record)  # 6, 7
            _note_decision(decision, record)
            self._await_prefill(question, decision, booking)
            try:
                await self._attempt(
                    question, decision, booking, exchange=exchange, record=record, last=last
                )  # 8, 9
            except UpstreamFailed as error:
                if not error.timeout:
                    self._suspects.note(error.instance_id)
                if last or not error.retryable:
                    raise
                telemetry.RETRIES.labels(cause=error.reason).inc()
            else:
                return
            finally:
                self._ledger.release(booking)
            record.retries_count += 1
            failed.add(decision.instance.instance_id)
            snapshot = without(snapshot, failed)

    def _await_prefill(self, question: Question, decision: Decision, booking: Booking) -> None:
        """A plain answer shows its first byte at its end; its sidecar sees the prefill end."""
        if not question.stores_tell:
            return
        block = last_full_block(
            question.hashes,
            prompt_tokens=question.view.prompt_tokens,
            block_size_tokens=question.served.fleet.block_size_tokens,
            engine_block_size_tokens=decision.instance.block_size_tokens,
        )
        if block is None:  # fewer tokens than a block; they must not vanish within a burst
            loop = asyncio.get_running_loop()
            loop.call_later(SHORT_PREFILL_S, self._ledger.prefilled, booking)
        else:
            self._ledger.awaits(booking, block)

    async def _attempt(
        self,
        question: Question,
        decision: Decision,
        booking: Booking,
        *,
        exchange: Exchange,
        record: RequestRecord,
        last: bool,
    ) -> None:
        """Steps 8 and 9 on one instance."""
        async with self._upstream.open(decision.instance, question.call) as answer:
            if answer.status in RETRIED_STATUSES and not last:
                raise UpstreamFailed(
                    decision.instance.instance_id,
                    f"The instance answered {answer.status}.",
                    before_first_byte=True,
                )
            record.status = answer.status
            if record.received_s is not None:
                record.routing_s = answer.sent_s - record.received_s
            if answer.event_stream:  # of a plain answer the first byte comes at the end
                self._ledger.prefilled(booking)
            await exchange.start(answer, decision)
            try:
                await self._upstream.relay(answer, exchange)
                await exchange.finish()
            finally:
                record.output_bytes = answer.output_bytes
                record.cached_tokens = answer.cached_tokens()
                self._predictions.settle(question.call, decision, question.hashes, record)
                if answer.first_out_s is not None:
                    record.first_byte_added_s = answer.first_out_s - answer.first_byte_s
                    record.ttft_s = answer.first_out_s - record.accepted_s

    def _policy(self, call: ApiCall) -> Policy:
        name = call.policy
        if name is None:
            return self._policies[self._default_policy]
        if not self._allow_policy_override:
            raise RequestInvalid(
                f"{names.POLICY}: this router takes no policy from requests; leave the header "
                "out, or start the router with --allow_policy_override true.",
                param=names.POLICY,
            )
        if name not in self._policies:
            known = ", ".join(sorted(self._policies))
            raise RequestInvalid(
                f"{names.POLICY}: unknown policy `{name}`; known policies: {known}.",
                param=names.POLICY,
            )
        return self._policies[name]


def _stores_tell(call: ApiCall, prompt: EncodedPrompt) -> bool:
    """Of one prompt whose token ids are known and which reuses what is there.

    One that computes all again finds its blocks stored by others before it has begun; of several
    prompts only the first one's blocks are known here.
    """
    known = bool(prompt.packed) and call.reads_prefixes and call.prompts_count == 1
    return known and not call.stream


def _hashes(prompt: EncodedPrompt, served: ServedModel, call: ApiCall) -> bytes:
    if not prompt.packed or not call.reads_prefixes:
        return b""
    fleet = served.fleet
    root = block_hash.root(
        model_scope=fleet.model_scope,
        block_size_tokens=fleet.block_size_tokens,
        adapter=served.adapter,
        salt=call.cache_salt,
    )
    bytes_max = BLOCKS_PER_LOOKUP_MAX * fleet.block_size_tokens * TOKEN_BYTES
    return block_hash.chain(root, prompt.packed[:bytes_max], fleet.block_size_tokens)


def _note_decision(decision: Decision, record: RequestRecord) -> None:
    record.instance_id = decision.instance.instance_id
    record.hit_tokens = decision.hit_tokens
    record.in_flight_tokens = decision.in_flight_tokens
    record.new_prefill_tokens = decision.new_prefill_tokens
    record.queued_prefill_tokens = decision.queued_prefill_tokens
    record.batch_size = decision.batch_size
    record.score = decision.score


def _degrade(record: RequestRecord, cause: DegradedCause) -> None:
    """A decision goes on without something; counted here and nowhere else."""
    telemetry.DEGRADED.labels(cause=cause).inc()
    record.degraded, record.degraded_cause = True, record.degraded_cause or cause
