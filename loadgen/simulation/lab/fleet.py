"""A fleet of fast engines and the router's own decisions, as one discrete-event loop. Pure.

No sockets, no Redis and no clock: equal arguments give equal results. Policies, eligibility,
ranking and the laws of reservations are the router's; the engines are
`workers.simulated.fast.engine.SpanEngine`, bit-equal to those that serve HTTP.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from indexer.contract.milestones import Milestones
from loadgen.simulation.chain_holders import ChainHolders
from loadgen.simulation.instances import (
    BLOCK_SIZE_TOKENS,
    make_engine_config,
    make_membership,
    make_prefill_cost,
)
from loadgen.simulation.lab.delayed_books import DelayedBooks
from loadgen.simulation.lab.demand import Demand
from loadgen.simulation.lab.figures import BusySamples, Requests
from loadgen.simulation.lab.tier import LabTier
from loadgen.simulation.reserving import detected, reserve_shared
from loadgen.simulation.shared_books import SharedBooks
from loadgen.simulation.span_driver import SpanDriver
from loadgen.workloads.pacing import Pacer
from router.decide import decide
from router.eligibility import Sighting, eligible_snapshot
from router.policies.base import Policy, for_router, tell_decided, tell_ended
from router.snapshot import Decision, RequestView
from workers.simulated.engine import RequestTooLongError
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.span import ChainAdmission, Reached
from workers.simulated.tier import TierConfig

LOST = -1
"""Slot of a request that no engine could take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """The fleet.

    Attributes:
        instances: how many, all of one profile.
        routers: how many; each request goes to a random one, drawn apart from the workload.
        staleness_s: 0: routers share their reservations, as through Redis. Else each knows its own
            requests at once and everything else so much later; no reservation answers.
        detects_hot_prefixes: routers take the holders of too hot a prefix out (`router.detector`);
            needs shared reservations.
        tier: a store of KV$ that all instances share and routers credit; None: there is none.
        decide_s: arrival -> the choice, with the counters of then.
        note_s: first token or end -> the counters say so.
        events_s: the end of an engine's step -> the index knows its blocks.
        report_interval_s: between an engine's reports of running and waiting requests.
        sample_interval_s: between looks at the instances' busy time.
    """

    instances: int = 16
    routers: int = 1
    staleness_s: float = 0.0
    detects_hot_prefixes: bool = False
    profile: str = "h20-qwen3-30b-a3b"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    capacity_blocks: int | None = None
    tier: TierConfig | None = None
    decide_s: float = 0.002
    note_s: float = 0.001
    events_s: float = 0.020
    report_interval_s: float = 0.1
    sample_interval_s: float = 1.0


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A request between its choice and its end."""

    place: int
    router: int
    view: RequestView
    decision: Decision


@dataclass(slots=True, kw_only=True)
class LabRun:
    """What a run leaves behind: requests in the order of the demand, samples, the end's time."""

    requests: Requests
    busy: BusySamples
    virtual_s: float


@dataclass(slots=True)
class _Columns:
    """The columns of `Requests` while they fill."""

    count: int
    arrived_s: np.ndarray = field(init=False)
    first_token_s: np.ndarray = field(init=False)
    ended_s: np.ndarray = field(init=False)
    hit_tokens: np.ndarray = field(init=False)
    tier_hit_tokens: np.ndarray = field(init=False)
    slot: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.arrived_s, self.first_token_s, self.ended_s, self.hit_tokens, self.tier_hit_tokens = (
            np.full(self.count, math.nan) for _ in range(5)
        )
        self.slot = np.full(self.count, LOST, np.int64)


class LabFleet:
    """One run; `play` it once.

    Args:
        spec: the fleet.
        policy: every router's.
        demand: what is asked.
        seed: of which router gets which request.
    """

    def __init__(self, spec: LabSpec, policy: Policy, demand: Demand, *, seed: int) -> None:
        self.spec, self.demand, self.now_s = spec, demand, 0.0
        count = spec.instances
        config = make_engine_config(
            spec.profile,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            capacity_blocks=spec.capacity_blocks,
        )
        self._policies = [for_router(policy, lambda: self.now_s) for _ in range(spec.routers)]
        self._tier: LabTier | None = None
        if spec.tier is not None:
            self._tier = LabTier(spec.tier, block_size_tokens=BLOCK_SIZE_TOKENS)
        columns = None if self._tier is None else self._tier.columns
        self.engines = [SpanEngine(config, tier=columns) for _ in range(count)]
        for engine in self.engines:
            engine.pool.learn(demand.identities_count)
        self._drivers = [
            SpanDriver(engine, self._at, admitted=self._admitted, reached=self._reached)
            for engine in self.engines
        ]
        self._books = SharedBooks(count)
        for slot in range(count):
            self._books.open(slot)
        self._delayed = (
            DelayedBooks(spec.routers, count, staleness_s=spec.staleness_s, at=self._at)
            if spec.staleness_s
            else None
        )
        self._holders = ChainHolders(count, demand.identities_count)
        self._fleet, self._roster = make_membership(count, config)
        self._prefill_cost = make_prefill_cost(config)
        self._pacer = Pacer(demand.steps)
        self._asked_s = math.inf
        self._router_of = np.random.default_rng([seed, 2]).integers(
            spec.routers, size=len(demand.requests)
        )
        self._sequences = [itertools.count() for _ in range(spec.routers)]
        self._flights: dict[int, _Flight] = {}
        self._reports_due = [False] * count
        self._columns = _Columns(len(demand.requests))
        self._samples: list[tuple[float, list[float]]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._in_flight = 0

    def play(self) -> LabRun:
        """Run until every request has ended."""
        self._ask_pacer()
        self._sample()
        while self._due:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        assert not self._flights, "a request has not ended"
        assert not self._books.entries, "a reservation is left"
        assert self._delayed is None or self._delayed.is_empty, "something is booked still"
        columns, requests = self._columns, self.demand.requests
        return LabRun(
            requests=Requests(
                nominal_s=np.array(self.demand.nominal_s),
                arrived_s=columns.arrived_s,
                first_token_s=columns.first_token_s,
                ended_s=columns.ended_s,
                hit_tokens=columns.hit_tokens,
                tier_hit_tokens=columns.tier_hit_tokens,
                slot=columns.slot,
                prompt_tokens=np.array([r.prompt_tokens for r in requests], float),
                output_tokens=np.array([r.output_tokens for r in requests], float),
            ),
            busy=BusySamples(
                at_s=np.array([at_s for at_s, _ in self._samples]),
                busy_s=np.array([busy for _, busy in self._samples]),
            ),
            virtual_s=self.now_s,
        )

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), action))

    def _sample(self) -> None:
        self._samples.append((self.now_s, [e.busy_s(self.now_s) for e in self.engines]))
        if self._in_flight or self._pacer.left_count:
            self._at(self.now_s + self.spec.sample_interval_s, self._sample)

    # -- requests ---------------------------------------------------------------------------------

    def _ask_pacer(self) -> None:
        """Have the next due request sent when it is due; an answer may bring an earlier one."""
        due_s = self._pacer.next_due_s
        if due_s is not None and due_s < self._asked_s:
            self._asked_s = max(due_s, self.now_s)
            self._at(self._asked_s, partial(self._send_due, self._asked_s))

    def _send_due(self, asked_s: float) -> None:
        if asked_s != self._asked_s:
            return  # an earlier one came between and has asked anew
        self._asked_s = math.inf
        for place in self._pacer.take(self.now_s):
            self._columns.arrived_s[place] = self.now_s
            self._in_flight += 1
            self._at(self.now_s + self.spec.decide_s, partial(self._decide, place))
        self._ask_pacer()

    def _decide(self, place: int) -> None:
        request, demand = self.demand.requests[place], self.demand
        router = int(self._router_of[place])
        view = RequestView(
            request_id=request.request_id,
            sequence=next(self._sequences[router]),
            prompt_tokens=request.prompt_tokens,
            session_id=str(demand.sessions[place]),
            turn=demand.turns[place],
            history_tokens=demand.history_of(place),
        )
        decision = self._decision(place, router, view, request.blocks)
        tell_decided(self._policies[router], view, decision)
        flight = _Flight(place=place, router=router, view=view, decision=decision)
        self._flights[place] = flight
        self._columns.slot[place] = decision.slot
        try:
            self._drivers[decision.slot].add(request, self.now_s)
        except RequestTooLongError:
            self._columns.slot[place] = LOST
            del self._flights[place]
            self._release(flight, None)
            self._end(place)
        else:
            self._changed(decision.slot)

    def _decision(self, place: int, router: int, view: RequestView, blocks: np.ndarray) -> Decision:
        """Choose by what the router knows at this moment, and book."""
        spec, policy = self.spec, self._policies[router]
        known_s = self.now_s - spec.events_s - spec.staleness_s
        for slot, engine in enumerate(self.engines):
            self._holders.apply(slot, engine.changes(known_s))
        prompt = blocks[: view.prompt_tokens // BLOCK_SIZE_TOKENS]
        milestones = None
        if self._delayed is None:
            milestones = Milestones.of(
                prompt.tobytes(),
                prompt_tokens=view.prompt_tokens,
                block_size_tokens=BLOCK_SIZE_TOKENS,
            )
        counters, siblings = self._books.read(self.now_s, milestones.packed if milestones else b"")
        sighting = Sighting(
            fleet=self._fleet,
            roster=self._roster,
            counters=counters,
            depth_blocks=self._holders.depths(prompt),
            siblings=siblings,
            taken_s=self.now_s,
        )
        snapshot = eligible_snapshot(sighting, view.prompt_tokens, prefill_cost=self._prefill_cost)
        if self._tier is not None:
            snapshot = self._tier.seen(snapshot, view.prompt_tokens, prompt)
        key = (router, place)
        if self._delayed is None:
            detection = None
            if spec.detects_hot_prefixes:
                hashes = prompt.tobytes()
                detection = detected(self._books, hashes, snapshot, now_s=self.now_s)
                snapshot = detection.candidates(snapshot)
            return reserve_shared(
                self._books,
                policy,
                key,
                view,
                snapshot,
                milestones=milestones,
                now_s=self.now_s,
                detection=detection,
            )
        decision = decide(policy, view, self._delayed.seen(router, snapshot))
        self._delayed.book(
            router,
            decision.slot,
            requests=1,
            tokens=decision.new_prefill_tokens,
            context_tokens=decision.context_tokens,
            now_s=self.now_s,
        )
        return decision

    def _end(self, place: int) -> None:
        """The client has its answer, or an error."""
        self._in_flight -= 1
        self._pacer.answered(place, self.now_s)
        self._ask_pacer()

    # -- what engines do --------------------------------------------------------------------------

    def _admitted(self, admissions: Sequence[ChainAdmission], now_s: float) -> None:
        del now_s
        for admission in admissions:
            place = int(admission.request.request_id)
            self._columns.hit_tokens[place] = admission.hit_tokens
            self._columns.tier_hit_tokens[place] = admission.tier_hit_tokens
            self._changed(int(self._columns.slot[place]))

    def _reached(self, reached: Sequence[Reached], now_s: float) -> None:
        note_s = now_s + self.spec.note_s
        for request, first, last in reached:
            place = int(request.request_id)
            flight = self._flights[place]
            if first:
                self._columns.first_token_s[place] = now_s
                self._at(note_s, partial(self._prefilled, flight))
            if last:
                self._columns.ended_s[place] = now_s
                decode_s = now_s - float(self._columns.first_token_s[place])
                self._at(note_s, partial(self._release, flight, decode_s))
                del self._flights[place]
                self._changed(flight.decision.slot)
                self._end(place)

    def _prefilled(self, flight: _Flight) -> None:
        if self._delayed is None:
            self._books.prefilled((flight.router, flight.place))
        else:
            self._take_back(flight, requests=0, tokens=flight.decision.new_prefill_tokens)

    def _release(self, flight: _Flight, decode_s: float | None) -> None:
        tell_ended(self._policies[flight.router], flight.view, flight.decision, decode_s)
        if self._delayed is None:
            self._books.release((flight.router, flight.place))
        else:  # of what never was prefilled, the tokens too
            tokens = flight.decision.new_prefill_tokens if decode_s is None else 0
            self._take_back(flight, requests=1, tokens=tokens)

    def _take_back(self, flight: _Flight, *, requests: int, tokens: int) -> None:
        """From the book of a router that shares no reservations."""
        assert self._delayed is not None, "reservations are shared"
        self._delayed.book(
            flight.router,
            flight.decision.slot,
            requests=-requests,
            tokens=-tokens,
            context_tokens=flight.decision.context_tokens,
            now_s=self.now_s,
        )

    def _changed(self, slot: int) -> None:
        """Counters of an engine have changed: its next report, at its own moments, says so."""
        if self._reports_due[slot]:
            return
        self._reports_due[slot] = True
        interval_s = self.spec.report_interval_s
        offset_s = interval_s * (slot + 1) / len(self.engines)
        rounds = math.floor((self.now_s - offset_s) / interval_s) + 1
        self._at(max(rounds * interval_s + offset_s, self.now_s), partial(self._report, slot))

    def _report(self, slot: int) -> None:
        self._reports_due[slot] = False
        engine = self.engines[slot]
        books = self._books if self._delayed is None else self._delayed
        books.report(
            slot,
            running_count=engine.running_count,
            waiting_count=engine.waiting_count,
            kv_usage_ratio=engine.pool.used_count / engine.config.capacity_blocks,
            now_s=self.now_s,
        )
