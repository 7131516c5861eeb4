"""What a policy may look at: the request and one immutable, columnar view of its fleet."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from indexer.contract.identifiers import InstanceId
from indexer.contract.records import FleetRecord, InstanceRecord
from indexer.contract.reservations import context_tokens

Column = npt.NDArray[np.int64]
"""One value per instance, in the order of `FleetSnapshot.instances`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What is known of a request when an instance is chosen for it."""

    request_id: str
    sequence: int  # counts the requests of this router process
    prompt_tokens: int  # after chat template and tokenization
    session_id: str | None = None  # a hint of the client, never required
    turn: int = 0  # earlier assistant messages in the prompt
    history_tokens: int | None = None  # those up to the last of them; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """How long prefill takes on the fastest device of a fleet.

    n uncached tokens of a prompt of L tokens: linear x n + attention x n (L - n / 2) seconds.

    Attributes:
        linear_s_per_token: of each uncached token.
        attention_s_per_pair: of each pair of such a token and one that it attends to.
    """

    linear_s_per_token: float
    attention_s_per_pair: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The eligible instances of one fleet at one instant. All columns have shape (instances,).

    Attributes:
        fleet: what the instances share.
        instances: records, in slot order.
        identity: uint64 digest of each instance id, for tie-breaks.
        slot: slot index of each instance.
        generation: incarnation of that slot.
        block_size_tokens: the engine's own block.
        depth_tokens: leading prompt tokens that are resident there, or about to be: as the index
            has them, whole canonical blocks, not floored to what the engine will reuse.
        hit_tokens: leading prompt tokens that the engine will reuse: resident there, or about to be
            computed by a request in flight; min(hit depth, prompt_tokens - 1) floored to the
            engine's own block; 0 when degraded.
        in_flight_tokens: those of hit_tokens that only a request in flight accounts for.
        new_prefill_tokens: prompt_tokens - hit_tokens; at least 1. Where a tier is known, those
            that are loaded from it count as many as `tier_cost_tokens` says.
        queued_prefill_tokens: new prefill tokens reserved on the instance and not yet computed.
        queued_context_tokens: how many tokens each of those attends to, on average; 0 where nobody
            told. Times queued_prefill_tokens it is the queue's attention, in pairs of tokens.
        batch_size: requests the instance is responsible for: reserved plus foreign.
        running_count: requests in the engine's batch as it last reported; stale by counters_age_s.
        waiting_count: requests queued in the engine as it last reported; same staleness.
        kv_usage_ratio: 0..1, same staleness.
        published_s: Redis time of the engine's report; 0 when there was none.
        looked_s: Redis time at which the index was asked.
        taken_s: wall clock of the router when the counters were asked for.
        degraded: the index did not answer: instances and counters are the last known, hits are 0.
        degraded_cause: why.
        approximate: no token ids are known: lengths and hits are estimates from text.
        slowness: how much longer each instance takes for a token of prefill than the fastest one,
            in thousandths; None where devices are alike, or nobody tells.
        abilities: what each instance is for, an `eligibility.Ability` each; None where all are for
            both prefill and decode.
        prefill_cost: of the fastest one, as this router has seen it; None: not seen often enough.
        tier_tokens: those of the prompt behind hit_tokens that can be loaded from a tier of KV$;
            None where no tier is known, or it holds nothing that the instances lack.
        tier_cost_tokens: new prefill tokens that take as long as that load; with tier_tokens.
    """

    fleet: FleetRecord
    instances: tuple[InstanceRecord, ...]
    identity: npt.NDArray[np.uint64]
    slot: Column
    generation: Column
    block_size_tokens: Column
    depth_tokens: Column
    hit_tokens: Column
    in_flight_tokens: Column
    new_prefill_tokens: Column
    queued_prefill_tokens: Column
    queued_context_tokens: Column
    batch_size: Column
    running_count: Column
    waiting_count: Column
    kv_usage_ratio: npt.NDArray[np.float64]
    published_s: npt.NDArray[np.float64]
    looked_s: float
    taken_s: float
    degraded: bool = False
    degraded_cause: str | None = None
    approximate: bool = False
    slowness: Column | None = None
    abilities: Column | None = None
    prefill_cost: PrefillCost | None = None
    tier_tokens: Column | None = None
    tier_cost_tokens: Column | None = None

    def slowness_of(self, places: npt.NDArray[np.intp]) -> Column | None:
        """Of these places only, in this order."""
        return None if self.slowness is None else self.slowness[places]

    @property
    def counters_age_s(self) -> npt.NDArray[np.float64]:
        """Seconds since each engine's report; infinite when there was none."""
        return np.where(self.published_s > 0, self.looked_s - self.published_s, np.inf)


Scores = npt.NDArray[np.float64]
"""Shape (instances,), one per `FleetSnapshot.instances`, same order; lower is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One instance as the decision saw it."""

    instance_id: InstanceId
    hit_tokens: int
    in_flight_tokens: int
    new_prefill_tokens: int
    queued_prefill_tokens: int
    batch_size: int
    score: float
    tier_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotClass:
    """All requests that share a prefix with one, often enough to matter; see `detector`.

    Attributes:
        prefix: hash that names it.
        depth_blocks: length of the prefix, canonical blocks.
        share: of recent requests, 0..1.
        holders: slots of those who hold it.
        alarm: there are so many of its requests that they may overload its holders.
        taken_out: holders are no candidates for them.
    """

    prefix: bytes
    depth_blocks: int
    share: float
    holders: tuple[int, ...]
    alarm: bool
    taken_out: bool

    @property
    def standing(self) -> str:
        """In a word: quiet, watched (an alarm), taken_out."""
        if self.taken_out:
            return "taken_out"
        return "watched" if self.alarm else "quiet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen instance and why.

    Attributes:
        policy: name of the policy that chose.
        snapshot: what it saw, with the counters of the moment of booking.
        scores: its score of every instance of the snapshot; lower is better.
        index: place of the chosen instance in the snapshot.
        booked_s: wall clock of the booking; None when nothing is booked.
        hot_class: of the request; None: it is of none, or nobody looked.
    """

    policy: str
    snapshot: FleetSnapshot
    scores: Scores
    index: int
    booked_s: float | None = None
    hot_class: HotClass | None = None

    @property
    def instance(self) -> InstanceRecord:
        """The chosen one."""
        return self.snapshot.instances[self.index]

    @property
    def slot(self) -> int:
        """Its slot index."""
        return int(self.snapshot.slot[self.index])

    @property
    def generation(self) -> int:
        """Incarnation of its slot."""
        return int(self.snapshot.generation[self.index])

    @property
    def score(self) -> float:
        """Its score, in the policy's unit."""
        return float(self.scores[self.index])

    @property
    def hit_tokens(self) -> int:
        """Predicted for it."""
        return int(self.snapshot.hit_tokens[self.index])

    @property
    def in_flight_tokens(self) -> int:
        """Those of its hit tokens that only a request in flight accounts for."""
        return int(self.snapshot.in_flight_tokens[self.index])

    @property
    def new_prefill_tokens(self) -> int:
        """Predicted for it."""
        return int(self.snapshot.new_prefill_tokens[self.index])

    @property
    def context_tokens(self) -> int:
        """That each of its new prefill tokens attends to, on average, as reservations count it."""
        return context_tokens(self.prompt_tokens, self.new_prefill_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Of the request."""
        return self.hit_tokens + self.tier_tokens + self.new_prefill_tokens - self._tier_cost_tokens

    @property
    def tier_tokens(self) -> int:
        """Of its prompt, to be loaded from a tier."""
        column = self.snapshot.tier_tokens
        return 0 if column is None else int(column[self.index])

    @property
    def _tier_cost_tokens(self) -> int:
        column = self.snapshot.tier_cost_tokens
        return 0 if column is None else int(column[self.index])

    @property
    def queued_prefill_tokens(self) -> int:
        """On it before this request."""
        return int(self.snapshot.queued_prefill_tokens[self.index])

    @property
    def batch_size(self) -> int:
        """On it before this request."""
        return int(self.snapshot.batch_size[self.index])

    @property
    def decided_s(self) -> float:
        """Wall clock of the router when the index was asked."""
        return self.snapshot.taken_s

    @property
    def snapshot_age_s(self) -> float | None:
        """Age of the snapshot when the request was booked."""
        return None if self.booked_s is None else self.booked_s - self.snapshot.taken_s

    @property
    def degraded(self) -> bool:
        """Decided without the index."""
        return self.snapshot.degraded

    @property
    def degraded_cause(self) -> str | None:
        """Why."""
        return self.snapshot.degraded_cause

    @property
    def approximate(self) -> bool:
        """Its hits are an estimate: from text, or of an instance that tells no events."""
        return self.snapshot.approximate or self.instance.learned

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Everyone who could have been chosen: the chosen one, then the others, best first."""
        order = [int(i) for i in np.argsort(self.scores, kind="stable") if i != self.index]
        return tuple(self._candidate(i) for i in (self.index, *order))

    def _candidate(self, index: int) -> Candidate:
        seen = self.snapshot
        return Candidate(
            instance_id=seen.instances[index].instance_id,
            hit_tokens=int(seen.hit_tokens[index]),
            in_flight_tokens=int(seen.in_flight_tokens[index]),
            new_prefill_tokens=int(seen.new_prefill_tokens[index]),
            queued_prefill_tokens=int(seen.queued_prefill_tokens[index]),
            batch_size=int(seen.batch_size[index]),
            score=float(self.scores[index]),
            tier_tokens=0 if seen.tier_tokens is None else int(seen.tier_tokens[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Where a request stands in its router's books."""

    fleet: FleetRecord
    sequence: int
