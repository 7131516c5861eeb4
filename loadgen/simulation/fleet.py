"""A fleet of simulated engines and several routers, as one discrete-event loop. Pure.

No sockets, no Redis and no clock: equal arguments give equal results. The routers decide with the
router's own functions and policies; every delay between what happens and who knows of it is stated
in `Delays`.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from indexer.contract.milestones import Milestones
from loadgen.simulation.instances import (
    BLOCK_SIZE_TOKENS,
    make_engine,
    make_membership,
    make_prefill_cost,
)
from loadgen.simulation.own_books import OwnBooks
from loadgen.simulation.prefix_holders import PrefixHolders
from loadgen.simulation.records import FleetRun, RequestRecord
from loadgen.simulation.reserving import reserve_shared
from loadgen.simulation.shared_books import Key, SharedBooks
from loadgen.simulation.workload import Session
from router.decide import decide
from router.eligibility import Sighting, eligible_snapshot
from router.policies.base import Policy, for_router, tell_decided, tell_ended
from router.snapshot import Decision, FleetSnapshot, RequestView
from workers.simulated.request import TOKEN_BYTES, Request, extend_hashes, root_hash
from workers.simulated.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds between what happens and who knows of it."""

    look_s: float = 0.001  # arrival at the router -> counters, depths and siblings are read
    reserve_s: float = 0.001  # that -> choice and booking, with the counters of then
    note_s: float = 0.001  # first token or end -> the counters say so
    events_s: float = 0.020  # an engine's step ends -> the index knows its blocks
    report_interval_s: float = 0.1  # engines' running and waiting
    router_factors: tuple[float, float] = (0.5, 2.0)
    """Of several routers each has its own multiple of the first three, uniform between these.

    Were all alike, requests would be booked in the order of their arrival and nothing could differ.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """What is simulated.

    Attributes:
        routers_count: each request goes to a random one, drawn apart from the workload.
        shares_reservations: False: each router knows its own requests and the engines' reports.
        join_s: when the last instance joins, cold; None: all are there from the beginning.
        end_s: nothing is sent any more; what is in flight ends.
    """

    routers_count: int
    end_s: float
    shares_reservations: bool = True
    instances_count: int = 16
    join_s: float | None = None
    profile: str = "h20-qwen3-30b-a3b"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    delays: Delays = field(default_factory=Delays)


class VirtualFleet:
    """One run; `play` it once."""

    def __init__(self, spec: FleetSpec, policy: Policy, seed: int) -> None:
        self.spec, self.now_s = spec, 0.0
        count = spec.instances_count
        self._policies = [for_router(policy, lambda: self.now_s) for _ in range(spec.routers_count)]
        self.engines = [
            make_engine(
                spec.profile,
                max_num_seqs=spec.max_num_seqs,
                max_num_batched_tokens=spec.max_num_batched_tokens,
            )
            for _ in range(count)
        ]
        self.books = SharedBooks(count)
        self.own = OwnBooks(spec.routers_count, count)
        self.holders = PrefixHolders(count)
        self.records: list[RequestRecord] = []
        self._router_of = np.random.default_rng([seed, 2])
        drawn = np.random.default_rng([seed, 3]).uniform(
            *spec.delays.router_factors, spec.routers_count
        )
        self._slowness = drawn.tolist() if spec.routers_count > 1 else [1.0]
        self._sequences = [itertools.count(1) for _ in range(spec.routers_count)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stepping = [False] * count
        self._live: dict[str, tuple[RequestRecord, Key, Callable[[], None]]] = {}
        self._told: dict[Key, tuple[RequestView, Decision]] = {}
        self._run = FleetRun(instances_count=count)
        self._fleet, self._roster = make_membership(count, self.engines[0].config)
        self._prefill_cost = make_prefill_cost(self.engines[0].config)
        for slot in range(count):
            if slot == count - 1 and spec.join_s is not None:
                self._at(spec.join_s, partial(self._join, slot))
            else:
                self._join(slot)

    def play(self, sessions: Sequence[Session]) -> FleetRun:
        """Run until every request has ended."""
        for session in sessions:
            self._at(session.start_s, partial(self._send, session, 0, session.shared))
        while self._due:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        assert not self._live, "a request has not ended"
        self._run.records = self.records
        return self._run

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), action))

    # -- instances --------------------------------------------------------------------------------

    def _join(self, slot: int) -> None:
        self.books.open(slot)
        interval_s = self.spec.delays.report_interval_s
        self._at(self.now_s + interval_s * (slot + 1) / len(self.engines), lambda: self._say(slot))

    def _say(self, slot: int) -> None:
        """An engine reports its counters, until all is over."""
        engine = self.engines[slot]
        self.books.report(
            slot,
            running_count=engine.running_count,
            waiting_count=engine.waiting_count,
            kv_usage_ratio=engine.kv_usage_ratio,
            now_s=self.now_s,
        )
        self.own.report(slot)
        self._run.sample(self.now_s, slot, engine)
        if self.now_s < self.spec.end_s or self._live:
            self._at(self.now_s + self.spec.delays.report_interval_s, lambda: self._say(slot))

    def _start(self, slot: int) -> None:
        if self._stepping[slot]:
            return
        step = self.engines[slot].start_step()
        if step is None:
            return
        for request, hit_tokens, _ in step.admissions:
            record = self._live[request.request_id][0]
            record.hit_tokens = hit_tokens
        self._stepping[slot] = True
        self._at(self.now_s + step.duration_s, lambda: self._finish(slot, step))

    def _finish(self, slot: int, step: Step) -> None:
        self._stepping[slot] = False
        output = self.engines[slot].finish_step(step)
        if output.events:
            events = output.events
            self._at(
                self.now_s + self.spec.delays.events_s, lambda: self.holders.apply(slot, events)
            )
        for token in output.tokens:
            if token.position and not token.last:
                continue
            record, key, follow_up = self._live[token.request.request_id]
            if not token.position:
                record.first_token_s = self.now_s
                self._note(key, self._prefilled, record)
            if token.last:
                record.ended_s = self.now_s
                del self._live[token.request.request_id]
                self._note(key, self._release, record)
                follow_up()
        self._start(slot)

    # -- one request ------------------------------------------------------------------------------

    def _send(self, session: Session, turn: int, history: bytes) -> None:
        """A client sends a turn, unless it is too late; the answer's end calls for the next."""
        router = int(self._router_of.integers(self.spec.routers_count))
        if self.now_s >= self.spec.end_s:
            return
        asked = session.turns[turn]
        prompt = history + asked.message

        def follow_up() -> None:
            if turn + 1 < len(session.turns):
                pause_s = session.turns[turn + 1].think_s
                said = prompt + asked.answer()
                self._at(self.now_s + pause_s, lambda: self._send(session, turn + 1, said))

        request = Request(
            request_id=f"{session.session_id}-{turn}",
            packed_prompt=prompt,
            output_tokens=asked.output_tokens,
            seed=asked.seed,
        )
        record = RequestRecord(
            request_id=request.request_id,
            router=router,
            arrived_s=self.now_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
        )
        self.records.append(record)
        hashes: list[int] = []
        extend_hashes(hashes, root_hash(None, None), prompt, BLOCK_SIZE_TOKENS * TOKEN_BYTES)
        key = (router, next(self._sequences[router]))
        self._live[request.request_id] = (record, key, follow_up)
        delay_s = self.spec.delays.look_s * self._slowness[router]
        asked_as = RequestView(
            request_id=request.request_id,
            sequence=key[1],
            prompt_tokens=request.prompt_tokens,
            session_id=session.session_id,
            turn=turn,
        )
        self._at(self.now_s + delay_s, lambda: self._look(request, record, asked_as, hashes))

    def _look(
        self, request: Request, record: RequestRecord, view: RequestView, hashes: list[int]
    ) -> None:
        milestones = None
        if self.spec.shares_reservations:
            milestones = Milestones.of(
                b"".join(name.to_bytes(8, "little") for name in hashes),
                prompt_tokens=request.prompt_tokens,
                block_size_tokens=BLOCK_SIZE_TOKENS,
            )
        counters, siblings = self.books.read(self.now_s, milestones.packed if milestones else b"")
        sighting = Sighting(
            fleet=self._fleet,
            roster=self._roster,
            counters=counters,
            depth_blocks=self.holders.depths(hashes),
            siblings=siblings,
            taken_s=self.now_s,
        )
        snapshot = eligible_snapshot(
            sighting, request.prompt_tokens, prefill_cost=self._prefill_cost
        )
        self._at(
            self.now_s + self.spec.delays.reserve_s * self._slowness[record.router],
            lambda: self._reserve(request, record, view, snapshot, milestones),
        )

    def _reserve(
        self,
        request: Request,
        record: RequestRecord,
        view: RequestView,
        snapshot: FleetSnapshot,
        milestones: Milestones | None,
    ) -> None:
        key = (record.router, view.sequence)
        policy = self._policies[record.router]
        if self.spec.shares_reservations:
            decision = reserve_shared(
                self.books,
                policy,
                key,
                view,
                snapshot,
                milestones=milestones,
                now_s=self.now_s,
            )
        else:
            decision = decide(policy, view, self.own.counted(key[0], snapshot))
            self.own.book(
                *(key[0], decision.slot),
                requests=1,
                tokens=decision.new_prefill_tokens,
                context_tokens=decision.context_tokens,
            )
        tell_decided(policy, view, decision)
        self._told[key] = (view, decision)
        record.slot = decision.slot
        record.reserved_tokens = decision.new_prefill_tokens
        self.engines[decision.slot].add(request)
        self._start(decision.slot)

    def _note(
        self, key: Key, action: Callable[[Key, RequestRecord], None], record: RequestRecord
    ) -> None:
        """A router tells everybody after the delay, and itself at once."""
        shares = self.spec.shares_reservations
        delay_s = self.spec.delays.note_s * self._slowness[key[0]] if shares else 0.0
        self._at(self.now_s + delay_s, lambda: action(key, record))

    def _prefilled(self, key: Key, record: RequestRecord) -> None:
        if self.spec.shares_reservations:
            self.books.prefilled(key)
        else:
            context_tokens, tokens = self._told[key][1].context_tokens, -record.reserved_tokens
            self.own.book(
                *(key[0], record.slot), requests=0, tokens=tokens, context_tokens=context_tokens
            )

    def _release(self, key: Key, record: RequestRecord) -> None:
        view, decision = self._told.pop(key)
        decode_s = record.ended_s - record.first_token_s
        tell_ended(self._policies[record.router], view, decision, decode_s)
        if self.spec.shares_reservations:
            self.books.release(key)
        else:
            self.own.book(key[0], record.slot, requests=-1, tokens=0)
