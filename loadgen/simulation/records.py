"""What a virtual run leaves behind, and its figures. Pure."""

from dataclasses import dataclass, field

import numpy as np

from workers.simulated.engine import Engine


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request; times in virtual seconds, NaN until they have come.

    Attributes:
        reserved_tokens: new prefill tokens that its router expected.
        hit_tokens: what the engine found resident.
    """

    request_id: str
    router: int
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    slot: int = -1
    reserved_tokens: int = 0
    hit_tokens: int = 0
    first_token_s: float = float("nan")
    ended_s: float = float("nan")

    @property
    def ttft_s(self) -> float:
        """Arrival at the router to first token."""
        return self.first_token_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine at the time of a report."""

    at_s: float
    slot: int
    batch_size: int  # running and waiting
    busy_s: float  # since the start


@dataclass(slots=True, kw_only=True)
class FleetRun:
    """All requests, and all engines' reports."""

    instances_count: int
    records: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def sample(self, now_s: float, slot: int, engine: Engine) -> None:
        """Note an engine's state."""
        batch = engine.running_count + engine.waiting_count
        self.samples.append(Sample(now_s, slot, batch, engine.totals.busy_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of the requests that arrived in a window.

    Attributes:
        imbalance_ratio: largest over mean of the instances' busy time in the window.
    """

    requests_count: int
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    hit_ratio: float
    imbalance_ratio: float


def figures(run: FleetRun, *, from_s: float, to_s: float) -> Figures:
    """Measure a window."""
    seen = [r for r in run.records if from_s <= r.arrived_s < to_s]
    ttft = np.array([r.ttft_s for r in seen])
    tpot = np.array(
        [(r.ended_s - r.first_token_s) / (r.output_tokens - 1) for r in seen if r.output_tokens > 1]
    )
    return Figures(
        requests_count=len(seen),
        ttft_mean_s=float(ttft.mean()),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        tpot_mean_s=float(tpot.mean()),
        tpot_p99_s=float(np.percentile(tpot, 99)),
        hit_ratio=sum(r.hit_tokens for r in seen) / sum(r.prompt_tokens for r in seen),
        imbalance_ratio=_imbalance(run, from_s, to_s),
    )


def _imbalance(run: FleetRun, from_s: float, to_s: float) -> float:
    busy_s = np.zeros(run.instances_count)
    first: dict[int, float] = {}
    for sample in run.samples:
        if from_s <= sample.at_s < to_s:
            first.setdefault(sample.slot, sample.busy_s)
            busy_s[sample.slot] = sample.busy_s - first[sample.slot]
    return float(busy_s.max() / busy_s.mean())
