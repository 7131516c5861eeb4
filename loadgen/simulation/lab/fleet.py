"""A fleet of fast engines and the router's own decisions, as one discrete-event loop. Pure.

No sockets, no Redis and no clock: equal arguments give equal results. Policies, eligibility,
ranking and the laws of reservations are the router's; the engines are
`workers.simulated.fast.engine.SpanEngine`, bit-equal to those that serve HTTP.

Where prefill and decode are apart, a request's prompt is computed on one engine, handed over (the
decode engine takes what it lacks after the time of the transfer, while it goes on with others), and
all its tokens come from the other one.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from loadgen.simulation.instances import BLOCK_SIZE_TOKENS, make_engine_config
from loadgen.simulation.lab.demand import Demand
from loadgen.simulation.lab.figures import BusySamples, Requests
from loadgen.simulation.lab.routers import Asked, Flight, Routers
from loadgen.simulation.lab.spec import LabSpec
from loadgen.simulation.lab.tier import LabTier
from loadgen.simulation.span_driver import SpanDriver
from loadgen.workloads.pacing import Pacer
from router.legs import Leg
from router.policies.base import Policy
from router.snapshot import RequestView
from workers.simulated.engine import EngineConfig, RequestTooLongError
from workers.simulated.eviction.belady import Future
from workers.simulated.eviction.policies import BELADY
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.free_order import free_order
from workers.simulated.fast.request import ChainRequest
from workers.simulated.fast.span import ChainAdmission, Reached
from workers.simulated.fast.tier import TierColumns
from workers.simulated.tier import TierConfig

LOST: Final = -1
"""Slot of a request that no engine could take."""

_AT_ONCE: Final = TierConfig(capacity_blocks=1 << 40, tokens_per_s=math.inf, latency_s=0.0)
"""Of what has been handed over: it is there when the decode engine begins, the time has passed."""


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


def _future(demand: Demand) -> Future:
    """What will be asked for, in the order in which it would be if answers took no time."""
    return Future(
        (one.request_id, one.blocks[: one.prompt_tokens // BLOCK_SIZE_TOKENS].tolist())
        for one in demand.requests
    )


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
        config = make_engine_config(
            spec.profile,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            capacity_blocks=spec.capacity_blocks,
        )
        tier = None
        if spec.tier is not None:
            tier = LabTier(spec.tier, block_size_tokens=BLOCK_SIZE_TOKENS)
        self._handed_over = TierColumns(_AT_ONCE)
        future = _future(demand) if spec.eviction == BELADY else None
        self.engines = [self._engine(slot, config, tier, future) for slot in range(spec.instances)]
        self._drivers = [
            SpanDriver(engine, self._at, admitted=self._admitted, reached=self._reached)
            for engine in self.engines
        ]
        self._routers = Routers(
            spec,
            policy,
            self.engines,
            identities_count=demand.identities_count,
            tier=tier,
            at=self._at,
            clock=lambda: self.now_s,
        )
        self._pacer = Pacer(demand.steps)
        self._asked_s = math.inf
        self._router_of = np.random.default_rng([seed, 2]).integers(
            spec.routers, size=len(demand.requests)
        )
        self._flights: dict[int, Flight] = {}
        self._reports_due = [False] * spec.instances
        self._columns = _Columns(len(demand.requests))
        self._samples: list[tuple[float, list[float]]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._in_flight = 0

    def _engine(
        self, slot: int, config: EngineConfig, tier: LabTier | None, future: Future | None
    ) -> SpanEngine:
        decodes_only = self.spec.is_parted and slot >= self.spec.prefill_instances
        columns = self._handed_over if decodes_only else None if tier is None else tier.columns
        order = free_order(self.spec.eviction, config.capacity_blocks, future)
        engine = SpanEngine(config, order, columns)
        engine.pool.learn(self.demand.identities_count)
        return engine

    def play(self) -> LabRun:
        """Run until every request has ended."""
        self._ask_pacer()
        self._sample()
        while self._due:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        assert not self._flights, "a request has not ended"
        assert self._routers.is_idle, "something is booked still"
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
                prefill_instances=self.spec.prefill_instances,
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
        asked = Asked(
            router=router,
            view=RequestView(
                request_id=request.request_id,
                sequence=self._routers.next_number(router),
                prompt_tokens=request.prompt_tokens,
                session_id=str(demand.sessions[place]),
                turn=demand.turns[place],
                history_tokens=demand.history_of(place),
            ),
            blocks=request.blocks[: request.prompt_tokens // BLOCK_SIZE_TOKENS],
            generates=request.output_tokens > 1,
        )
        flight = self._routers.choose(asked, self.now_s)
        if flight.leg is Leg.PREFILL:
            request = replace(request, output_tokens=1, blocks=asked.blocks)
        self._add(place, flight, request)

    def _add(self, place: int, flight: Flight, request: ChainRequest) -> None:
        """To the queue of the chosen engine, which refuses what could not finish even alone."""
        self._flights[place] = flight
        self._columns.slot[place] = flight.slot
        try:
            self._drivers[flight.slot].add(request, self.now_s)
        except RequestTooLongError:
            self._columns.slot[place] = LOST
            del self._flights[place]
            self._routers.released(flight, self.now_s, None)
            self._end(place)
        else:
            self._changed(flight.slot)

    def _hand_over(self, place: int, asked: Asked) -> None:
        """Prefilled: choose who decodes, who begins when what it lacks has come."""
        flight = self._routers.choose_decoder(asked, self.now_s)
        held = len(self.engines[flight.slot].pool.match(asked.blocks))
        tokens = asked.view.prompt_tokens - held * BLOCK_SIZE_TOKENS
        self._at(
            self.now_s + self.spec.handovers.transfer_s(tokens),
            partial(self._decode, place, flight),
        )

    def _decode(self, place: int, flight: Flight) -> None:
        self._handed_over.learn(self.demand.identities_count)
        self._handed_over.write(flight.asked.blocks)
        self._add(place, flight, self.demand.requests[place])

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
            flight = self._flights[place]
            if flight.leg is not Leg.DECODE:  # hits are the prefill's
                self._columns.hit_tokens[place] = admission.hit_tokens
                self._columns.tier_hit_tokens[place] = admission.tier_hit_tokens
            self._changed(flight.slot)

    def _reached(self, reached: Sequence[Reached], now_s: float) -> None:
        note_s = now_s + self.spec.note_s
        for request, first, last in reached:
            place = int(request.request_id)
            flight = self._flights[place]
            if first:
                self._columns.first_token_s[place] = now_s
                self._at(note_s, partial(self._prefilled, flight))
            if not last:
                continue
            columns = self._columns
            first_s = float(columns.first_token_s[place])
            cached = int(columns.hit_tokens[place] + columns.tier_hit_tokens[place])
            self._at(note_s, partial(self._released, flight, now_s - first_s))
            self._routers.seen(flight, first_token_s=first_s, cached_tokens=cached)
            del self._flights[place]
            self._changed(flight.slot)
            if flight.leg is Leg.PREFILL:
                at_s = now_s + self.spec.decide_s
                self._at(at_s, partial(self._hand_over, place, flight.asked))
            else:
                self._columns.ended_s[place] = now_s
                self._end(place)

    def _prefilled(self, flight: Flight) -> None:
        self._routers.prefilled(flight, self.now_s)

    def _released(self, flight: Flight, decode_s: float) -> None:
        self._routers.released(flight, self.now_s, decode_s)

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
        self._routers.books.report(
            slot,
            running_count=engine.running_count,
            waiting_count=engine.waiting_count,
            kv_usage_ratio=engine.pool.used_count / engine.config.capacity_blocks,
            now_s=self.now_s,
        )
