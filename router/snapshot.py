"""What a policy may look at: the request and one immutable, columnar view of its fleet."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from indexer.contract.identifiers import RouterId
from indexer.contract.records import FleetRecord, InstanceRecord

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The eligible instances of one fleet at one instant. All columns have shape (instances,).

    Attributes:
        fleet: what the instances share.
        instances: records, in slot order.
        slot: slot index of each instance.
        generation: incarnation of that slot.
        hit_tokens: leading prompt tokens resident on the instance, as the engine would reuse them:
            min(hit depth, prompt_tokens - 1) floored to the engine's own block; 0 when degraded.
        new_prefill_tokens: prompt_tokens - hit_tokens; at least 1.
        queued_prefill_tokens: new prefill tokens reserved on the instance and not yet computed.
        batch_size: requests the instance is responsible for: reserved plus foreign.
        reserved_requests: the routers' part of batch_size.
        running_count: requests in the engine's batch as it last reported; stale by counters_age_s.
        waiting_count: requests queued in the engine as it last reported; same staleness.
        kv_usage_ratio: 0..1, same staleness.
        counters_age_s: seconds since the engine's report; infinite when there was none.
        taken_s: wall clock of the router when the snapshot was taken.
        degraded: decided without the index: hits and counters are the last known, hits are 0.
    """

    fleet: FleetRecord
    instances: tuple[InstanceRecord, ...]
    slot: Column
    generation: Column
    hit_tokens: Column
    new_prefill_tokens: Column
    queued_prefill_tokens: Column
    batch_size: Column
    reserved_requests: Column
    running_count: Column
    waiting_count: Column
    kv_usage_ratio: npt.NDArray[np.float64]
    counters_age_s: npt.NDArray[np.float64]
    taken_s: float
    degraded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One instance as the decision saw it; the explanation lists all of them."""

    instance_id: str
    hit_tokens: int
    new_prefill_tokens: int
    queued_prefill_tokens: int
    batch_size: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chosen instance and why.

    Attributes:
        instance: the chosen one.
        slot: its slot index.
        generation: incarnation of that slot.
        policy: name of the policy that chose.
        score: its score, in the policy's unit; lower is better.
        hit_tokens: predicted for it.
        new_prefill_tokens: predicted for it.
        queued_prefill_tokens: on it before this request.
        batch_size: on it before this request.
        decided_s: wall clock of the router when the counters were read for the choice.
        snapshot_age_s: age of the snapshot when the request was booked.
        degraded: see FleetSnapshot.
        candidates: everyone who could have been chosen, best first.
    """

    instance: InstanceRecord
    slot: int
    generation: int
    policy: str
    score: float
    hit_tokens: int
    new_prefill_tokens: int
    queued_prefill_tokens: int
    batch_size: int
    decided_s: float
    snapshot_age_s: float
    degraded: bool
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Where a request stands in its router's books; None as router id: it is not in them."""

    fleet: FleetRecord
    router_id: RouterId | None
    sequence: int
