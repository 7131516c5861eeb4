"""All routers of a virtual fleet: what they know, how they choose, what they book. Pure.

They decide with the router's own eligibility, legs, policies and laws of reservations.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from indexer.contract.milestones import Milestones
from loadgen.simulation.chain_holders import ChainHolders
from loadgen.simulation.instances import BLOCK_SIZE_TOKENS, make_membership
from loadgen.simulation.lab.delayed_books import DelayedBooks
from loadgen.simulation.lab.spec import LabSpec
from loadgen.simulation.lab.tier import LabTier
from loadgen.simulation.reserving import detected, reserve_shared
from loadgen.simulation.shared_books import SharedBooks
from loadgen.simulation.span_driver import At
from router import legs
from router.decide import decide
from router.decode_leg import DECODE_LEG
from router.eligibility import Sighting, eligible_snapshot
from router.legs import Leg
from router.policies.base import Policy, for_router, tell_decided, tell_ended
from router.prefill_fit import PrefillFit, SeenPrefill
from router.snapshot import Decision, FleetSnapshot, RequestView
from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.engine import SpanEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as routers see it.

    Attributes:
        router: who got it.
        blocks: of its prompt, the full ones.
        generates: more than one token, so that there is something to decode apart.
    """

    router: int
    view: RequestView
    blocks: Identities
    generates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A leg of a request between its choice and its end.

    Attributes:
        key: of its booking: the router and one of that router's numbers.
        sent_s: when it was chosen.
    """

    asked: Asked
    leg: Leg
    policy: Policy
    key: tuple[int, int]
    decision: Decision
    sent_s: float

    @property
    def slot(self) -> int:
        """Where it is."""
        return self.decision.slot


class Routers:
    """The routers, and everything they share.

    Args:
        spec: the fleet.
        policy: every router's.
        engines: whose blocks the index hears of.
        identities_count: block identities are below it.
        tier: of the fleet.
        at: the loop's.
        clock: of policies that remember.
    """

    def __init__(
        self,
        spec: LabSpec,
        policy: Policy,
        engines: Sequence[SpanEngine],
        *,
        identities_count: int,
        tier: LabTier | None,
        at: At,
        clock: Callable[[], float],
    ) -> None:
        self._spec = spec
        self._engines = engines
        self._tier = tier
        self._policies = [for_router(policy, clock) for _ in range(spec.routers)]
        self._numbers = [itertools.count() for _ in range(spec.routers)]
        config, count = engines[0].config, len(engines)
        self._books = SharedBooks(count)
        for slot in range(count):
            self._books.open(slot)
        self._delayed = (
            DelayedBooks(spec.routers, count, staleness_s=spec.staleness_s, at=at)
            if spec.staleness_s
            else None
        )
        self._holders = ChainHolders(count, identities_count)
        self._fleet, self._roster = make_membership(
            count, config, prefill_count=spec.prefill_instances
        )
        self._fits = [PrefillFit() for _ in range(spec.routers)]

    @property
    def books(self) -> SharedBooks | DelayedBooks:
        """Where engines report to."""
        return self._books if self._delayed is None else self._delayed

    @property
    def is_idle(self) -> bool:
        """Nothing is booked."""
        return not self._books.entries and (self._delayed is None or self._delayed.is_empty)

    def next_number(self, router: int) -> int:
        """Counts the requests of a router, and their legs."""
        return next(self._numbers[router])

    def choose(self, asked: Asked, now_s: float) -> Flight:
        """An instance for the whole request, or for its prefill where that is apart; booked."""
        snapshot, milestones = self._look(asked, now_s)
        leg = legs.first_leg(snapshot, parts=asked.generates)
        snapshot = legs.pool(snapshot, leg, decodes=asked.generates)
        policy = self._policies[asked.router]
        key = (asked.router, asked.view.sequence)
        decision = self._book(asked, key, policy, snapshot, milestones=milestones, now_s=now_s)
        tell_decided(policy, asked.view, decision)
        leg = legs.leg_at(leg, decision)
        return Flight(asked=asked, leg=leg, policy=policy, key=key, decision=decision, sent_s=now_s)

    def choose_decoder(self, asked: Asked, now_s: float) -> Flight:
        """An instance that goes on with a prompt that another one has prefilled; booked."""
        snapshot, _ = self._look(asked, now_s)
        snapshot = legs.pool(snapshot, Leg.DECODE)
        snapshot = legs.handed_over(snapshot, asked.view.prompt_tokens)
        key = (asked.router, self.next_number(asked.router))
        decision = self._book(asked, key, DECODE_LEG, snapshot, milestones=None, now_s=now_s)
        return Flight(
            asked=asked,
            leg=Leg.DECODE,
            policy=DECODE_LEG,
            key=key,
            decision=decision,
            sent_s=now_s,
        )

    def prefilled(self, flight: Flight, now_s: float) -> None:
        """Its prompt has been computed."""
        if self._delayed is None:
            self._books.prefilled(flight.key)
        else:
            self._take_back(flight, now_s, requests=0, tokens=flight.decision.new_prefill_tokens)

    def released(self, flight: Flight, now_s: float, decode_s: float | None) -> None:
        """It has ended; None: without a token."""
        tell_ended(flight.policy, flight.asked.view, flight.decision, decode_s)
        if self._delayed is None:
            self._books.release(flight.key)
        else:  # of what never was prefilled, the tokens too
            tokens = flight.decision.new_prefill_tokens if decode_s is None else 0
            self._take_back(flight, now_s, requests=1, tokens=tokens)

    def seen(self, flight: Flight, *, first_token_s: float, cached_tokens: int) -> None:
        """What prefill costs, as its router learns it when the answer has ended.

        Args:
            flight: of it.
            first_token_s: when that came.
            cached_tokens: that its engine found.
        """
        if flight.leg is Leg.DECODE:  # whose prompt was handed over
            return
        seconds = first_token_s - flight.sent_s
        one = SeenPrefill.of(flight.decision, seconds=seconds, cached_tokens=cached_tokens)
        if one is not None:
            self._fits[flight.asked.router].add(one)

    def _look(self, asked: Asked, now_s: float) -> tuple[FleetSnapshot, Milestones | None]:
        """What the router knows at this moment."""
        spec, prompt_tokens = self._spec, asked.view.prompt_tokens
        known_s = now_s - spec.events_s - spec.staleness_s
        for slot, engine in enumerate(self._engines):
            self._holders.apply(slot, engine.changes(known_s))
        milestones = None
        if self._delayed is None:
            milestones = Milestones.of(
                asked.blocks.tobytes(),
                prompt_tokens=prompt_tokens,
                block_size_tokens=BLOCK_SIZE_TOKENS,
            )
        counters, siblings = self._books.read(now_s, milestones.packed if milestones else b"")
        sighting = Sighting(
            fleet=self._fleet,
            roster=self._roster,
            counters=counters,
            depth_blocks=self._holders.depths(asked.blocks),
            siblings=siblings,
            taken_s=now_s,
        )
        cost = self._fits[asked.router].cost
        snapshot = eligible_snapshot(sighting, prompt_tokens, prefill_cost=cost)
        if self._tier is not None:
            snapshot = self._tier.seen(snapshot, prompt_tokens, asked.blocks)
        return snapshot, milestones

    def _book(
        self,
        asked: Asked,
        key: tuple[int, int],
        policy: Policy,
        snapshot: FleetSnapshot,
        *,
        milestones: Milestones | None,
        now_s: float,
    ) -> Decision:
        if self._delayed is not None:
            decision = decide(policy, asked.view, self._delayed.seen(asked.router, snapshot))
            self._delayed.book(
                asked.router,
                decision.slot,
                requests=1,
                tokens=decision.new_prefill_tokens,
                context_tokens=decision.context_tokens,
                now_s=now_s,
            )
            return decision
        detection = None
        if self._spec.detects_hot_prefixes and policy is not DECODE_LEG:
            pool = legs.first_pool(
                self._roster.abilities, parts=asked.generates, decodes=asked.generates
            )
            detection = detected(
                self._books, asked.blocks.tobytes(), snapshot, now_s=now_s, pool=pool
            )
            snapshot = detection.candidates(snapshot)
        return reserve_shared(
            self._books,
            policy,
            key,
            asked.view,
            snapshot,
            milestones=milestones,
            now_s=now_s,
            detection=detection,
        )

    def _take_back(self, flight: Flight, now_s: float, *, requests: int, tokens: int) -> None:
        """From the book of a router that shares no reservations."""
        assert self._delayed is not None, "reservations are shared"
        self._delayed.book(
            flight.asked.router,
            flight.slot,
            requests=-requests,
            tokens=-tokens,
            context_tokens=flight.decision.context_tokens,
            now_s=now_s,
        )
