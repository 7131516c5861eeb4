"""The life of a request, top to bottom.

Whatever is decided about failures is decided here and in `dispatch`, about those of instances.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Final

from indexer.contract.block_hash import TOKEN_BYTES
from indexer.contract.milestones import Milestones
from indexer.contract.request_classes import ClassPrefixes, RecentClasses
from indexer.contract.responses import Holder
from router import response_holder, telemetry
from router.attempt import Question
from router.awaiting import PrefillEnd
from router.choosing import Chooser, degrade, explained
from router.course import DispatchBounds
from router.detector import Detection, detect
from router.dispatch import Dispatcher
from router.door.admission import Admission
from router.door.key_limits import KeyLimiter
from router.door.visitor import Visitor
from router.errors import DropReason, RouterError, TokensUnknown
from router.exchange import Exchange
from router.hold import Hold
from router.index.held_responses import HeldResponses
from router.index.index_client import IndexClient
from router.index.known_fleets import ServedModel
from router.instances.ejections import Ejections
from router.instances.upstream import Upstream
from router.ledger import Ledger
from router.legs import first_leg, first_pool
from router.model_lookup import ModelLookup
from router.overrides import Overrides
from router.policies.base import Policy
from router.predictions import Predictions
from router.prefill_costs import PrefillCosts
from router.recording.recorder import Recorder
from router.request_record import RequestRecord, Stage
from router.requests.api_call import ApiCall, Cost, OpaquePrompt
from router.requests.parting import decodes, parts
from router.requests.prompt_limits import refuse_huge, refuse_too_long
from router.snapshot import Column, Decision, FleetSnapshot, RequestView
from router.tokens import approximate
from router.tokens.hash_chains import HashChains
from router.tokens.tokenize import EncodedPrompt, Tokenizer

NO_PROMPT: Final = EncodedPrompt(packed=b"", prompt_tokens=1, longest_tokens=0, last_packed=b"")
"""Of a request that costs its engine nothing that counts."""


class Router:
    """Routes requests. Steps are numbered as in ARCHITECTURE.md, "Life of a request".

    Args:
        admission: the door.
        key_limiter: what callers may use.
        tokenizer: prompt -> token ids.
        chains: token ids -> block hashes.
        index: models and snapshots.
        ledger: reservations.
        upstream: to the instances.
        predictions: compares them with what engines report.
        policies: all that can be asked for, by name; those that remember are this router's own.
        default_policy: for requests that ask for none.
        allow_policy_override: whether a request may ask for one.
        allow_instance_choice: whether a request may name the instances it may go to.
        ejections: instances left out for a while.
        bounds: of what is done for one request.
        prefill_costs: fitted from what is seen of them.
        aliases: name that clients may ask for -> name that engines serve; keys may be for either.
        in_flight_credit: count what requests in prefill are about to compute.
        responses: knows who holds which answer; None: requests that name one are routed as others.
        detect_hot_prefixes: count classes of requests, and take holders out, see `detector`.
        recorder: is told of what has been answered; None: nobody records it.
    """

    def __init__(
        self,
        *,
        admission: Admission,
        key_limiter: KeyLimiter,
        tokenizer: Tokenizer,
        chains: HashChains,
        index: IndexClient,
        ledger: Ledger,
        upstream: Upstream,
        predictions: Predictions,
        policies: Mapping[str, Policy],
        default_policy: str,
        allow_policy_override: bool,
        ejections: Ejections,
        bounds: DispatchBounds,
        prefill_costs: PrefillCosts,
        aliases: Mapping[str, str],
        allow_instance_choice: bool = False,
        in_flight_credit: bool = True,
        responses: HeldResponses | None = None,
        detect_hot_prefixes: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        assert default_policy in policies, default_policy
        self._admission = admission
        self._key_limiter = key_limiter
        self._tokenizer = tokenizer
        self._chains = chains
        self._overrides = Overrides(
            policies=policies,
            default_policy=default_policy,
            allow_policy=allow_policy_override,
            allow_instances=allow_instance_choice,
        )
        self._models = ModelLookup(index, aliases)
        self._in_flight_credit = in_flight_credit
        self._detect_hot_prefixes = detect_hot_prefixes
        self._recorder = recorder
        self._responses = responses
        self._sequence = itertools.count()
        self._chooser = Chooser(
            index=index, ledger=ledger, ejections=ejections, prefill_costs=prefill_costs
        )
        self._dispatcher = Dispatcher(
            chooser=self._chooser,
            ledger=ledger,
            upstream=upstream,
            predictions=predictions,
            ejections=ejections,
            bounds=bounds,
            prefill_costs=prefill_costs,
            responses=responses,
        )

    async def route(self, exchange: Exchange, record: RequestRecord) -> None:
        """Answer one request.

        Raises:
            RouterError: the answer has not been started; it is the caller's to send.
        """
        try:
            with (  # 1 bounded, else Overloaded, KeyLimited
                self._key_limiter.visit(
                    exchange.visitor.caller, record.output_tokens_told
                ) as visit,
                self._admission.enter(exchange.visitor) as ticket,
            ):
                call = record.onward(await exchange.receive(ticket))
                record.lap(Stage.RECEIVE)
                await ticket.wait_for_place(call.body)
                record.lap(Stage.QUEUE)
                record.received_s = time.monotonic()
                question = await self._prepare(call, exchange.visitor, record)  # 2 - 5
                free = call.cost is Cost.NONE  # of tokens; it counts as a request
                limits = await visit.charge(0 if free else question.view.prompt_tokens)
                exchange.tell_limits(limits)
                await self._dispatcher.dispatch(question, exchange, record)  # 6 - 9
            record.outcome = "completed"
            if self._recorder is not None:
                self._recorder.take(question, record)
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
        return explained(await self._question(exchange, record))

    async def hold(self, exchange: Exchange, record: RequestRecord) -> Hold:
        """Decide and book as in `route`; somebody else sends the request, and tells of its end.

        Raises:
            RouterError: as in `route`.
        """
        return await self._chooser.hold(await self._question(exchange, record), record)

    async def _question(self, exchange: Exchange, record: RequestRecord) -> Question:
        """Steps 1 to 5 for whoever asks where a request would go."""
        with (
            self._key_limiter.visit(exchange.visitor.caller, record.output_tokens_told) as visit,
            self._admission.enter(exchange.visitor) as ticket,
        ):
            call = await exchange.receive(ticket)
            await ticket.wait_for_place(call.body)
            await visit.charge(0)  # a request of no tokens
            return await self._prepare(call, exchange.visitor, record)

    async def _prepare(self, call: ApiCall, visitor: Visitor, record: RequestRecord) -> Question:
        """Steps 2 to 5: what the decision rests on."""
        policy = self._overrides.policy(call)
        self._overrides.check_instances(call)
        record.model, record.stream, record.policy = call.model, call.stream, policy.name
        record.prompts_count = call.prompts_count
        if call.prompts_count > 1:
            telemetry.MULTI_PROMPT.inc()
        holder = None
        if call.names_response is not None and self._responses is not None:
            holder = await self._responses.find(call.names_response)
        served = await self._models.find(call, holder, visitor.caller)
        record.model, record.fleet = served.name, served.fleet.model_scope

        refuse_huge(served, call)
        prompt = await self._tokens(served, call, record)  # 2 text -> token ids
        record.prompt_tokens = prompt.prompt_tokens
        record.lap(Stage.TOKENIZE)
        refuse_too_long(prompt, served, call)
        hashes = self._chains.of(prompt.packed, served, call)  # 3 token ids -> block hashes
        hashes = hashes or approximate.chain(prompt.text, served, call)
        milestones = self._milestones(served, hashes, prompt)
        detects = self._detect_hot_prefixes and call.cost is not Cost.NONE
        counted_pool = _pool(served.roster.abilities, call, apart=True)
        prefixes = ClassPrefixes.of(hashes, counted_pool) if detects else None
        record.lap(Stage.HASH)
        sighting = await self._chooser.look(  # 4 one lookup, one read
            served, hashes, milestones, record, prefixes
        )
        record.lap(Stage.LOOK)
        if holder is not None and call.cost is Cost.NONE:
            sighting = response_holder.though_draining(sighting, holder)
        snapshot = self._chooser.eligible(  # 5 alive, awake, staying
            sighting,
            prompt.prompt_tokens,
            approximate=not prompt.packed and call.cost is not Cost.NONE,
        )
        apart = snapshot.abilities is not None and holder is None
        leg = first_leg(snapshot, parts=apart and parts(call))
        asked_pool: int | None = _pool(snapshot.abilities, call, apart=apart)
        alone = None
        if holder is not None:  # whatever it is for: nobody else has the answer
            alone = self._at_holder(self._chooser.spared(snapshot), holder, record)
            asked_pool = asked_pool if alone is None else None
        snapshot = alone or self._chooser.candidates(snapshot, leg, call)
        view = RequestView(
            request_id=call.request_id,
            sequence=next(self._sequence),
            prompt_tokens=prompt.prompt_tokens,
            session_id=call.session_id,
            turn=call.turn,
            history_tokens=_history_tokens(call, prompt),
        )
        return Question(
            call=call,
            policy=policy,
            served=served,
            hashes=hashes,
            milestones=milestones,
            view=view,
            snapshot=snapshot,
            prefill_end=self._prefill_end(hashes, prompt, served, call),
            leg=leg,
            detection=(
                None
                if prefixes is None
                else _detected(prefixes, sighting.recent_classes, snapshot, asked_pool)
            ),
        )

    def _at_holder(
        self, snapshot: FleetSnapshot, holder: Holder, record: RequestRecord
    ) -> FleetSnapshot | None:
        """The holder alone, whatever its score; None where it is not among them."""
        alone = response_holder.at_holder(snapshot, holder)
        telemetry.RESPONSES_NAMED.labels(result="gone" if alone is None else "held").inc()
        if alone is not None:
            record.held_by = alone.instances[0].instance_id
        return alone

    async def _tokens(
        self, served: ServedModel, call: ApiCall, record: RequestRecord
    ) -> EncodedPrompt:
        if call.cost is Cost.NONE:
            return NO_PROMPT
        if isinstance(call.prompt, OpaquePrompt):
            return approximate.estimated(served, call)
        try:
            return await self._tokenizer.encode(served, call)
        except TokensUnknown as error:  # without ids hits are estimates, and there is an answer
            degrade(record, error.cause)
            return approximate.estimated(served, call)

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

    def _prefill_end(
        self, hashes: bytes, prompt: EncodedPrompt, served: ServedModel, call: ApiCall
    ) -> PrefillEnd:
        if call.prompts_count > 1:
            hashes = self._chains.of(prompt.last_packed, served, call)
        return PrefillEnd(
            request_id=call.request_id,
            first_byte_tells=call.stream and call.prompts_count == 1,
            hashes=hashes,
            hashed_tokens=len(prompt.last_packed) // TOKEN_BYTES,
            prompt_tokens=prompt.prompt_tokens,
            block_size_tokens=served.fleet.block_size_tokens,
        )


def _pool(abilities: Column | None, call: ApiCall, *, apart: bool) -> int:
    """Number of the pool of the first leg, see `legs.first_pool`."""
    return first_pool(abilities, parts=apart and parts(call), decodes=decodes(call))


def _detected(
    prefixes: ClassPrefixes,
    recent: RecentClasses | None,
    snapshot: FleetSnapshot,
    asked_pool: int | None,
) -> Detection:
    """See `detect`; a request that is counted in another pool than the one asked is noted."""
    if asked_pool != prefixes.pool:
        telemetry.UNJUDGED.labels(reason="holder" if asked_pool is None else "pool").inc()
    return detect(prefixes, recent, snapshot, pool=asked_pool)


def _history_tokens(call: ApiCall, prompt: EncodedPrompt) -> int | None:
    """Of the prompt, up to the end of its last earlier answer: by the share of its characters."""
    share = call.history_share
    return None if share is None else int(share * prompt.prompt_tokens)
