"""Pure: records of requests -> figures.

Vantage point is the client. TTFT counts from sending (the moment a server can accept the request)
to the first non-empty token. How long after it was due a request was sent is the schedule lag,
reported on its own, so that a late generator is seen and does not pass for a slow fleet.
TPOT = (last token - first token) / (output tokens - 1), one mean per request, undefined for one
token. ITL is each gap between token events. Only requests without error count in times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from loadgen.records import RequestRecord

SCHEDULE_LAG_P99_MAX_S = 0.050  # beyond it the load offered was not the load wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Bounds a request has to meet to count as goodput.

    The defaults are those of SMetric (arXiv 2607.08565) with the TPOT of chat.

    Args:
        ttft_s: bound on TTFT of an empty prompt.
        ttft_per_1000_prompt_tokens_s: added per 1,000 prompt tokens.
        tpot_s: bound on TPOT.
    """

    ttft_s: float = 1.0
    ttft_per_1000_prompt_tokens_s: float = 0.0625
    tpot_s: float = 0.050

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request met both bounds; one token has no TPOT and meets that bound."""
        ttft, tpot = ttft_s(record), tpot_s(record)
        if ttft is None:
            return False
        bound_s = self.ttft_s + self.ttft_per_1000_prompt_tokens_s * record.prompt_tokens / 1000
        return ttft <= bound_s and (tpot is None or tpot <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and percentiles, in the unit of the values."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """None of no values."""
        if not len(values):
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(mean=float(np.mean(values)), p50=float(p50), p90=float(p90), p99=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run amounts to. None: nothing to tell it from.

    Args:
        requests_count: records, with and without error.
        errors_count: of them with an error.
        duration_s: first send to last end.
        offered_rate: requests per second the schedule asked for.
        sent_rate: requests per second actually sent.
        kept_up: whether the generator sent on time (P99 of the schedule lag at most 50 ms).
        goodput: requests per second that met the SLO.
        slo_ratio: share of all requests that met the SLO.
        hit_ratio_actual: sum of cached over sum of prompt tokens, as the engines tell it.
        hit_ratio_predicted: the same of hit tokens in the routers' decisions.
        predicted_exactly_ratio: of requests with both, those whose prediction was exact.
        in_flight_imbalance: largest over mean of the instances' request-seconds in flight; an
            instance that got no request is not seen by the client and not counted.
    """

    requests_count: int
    errors_count: int
    duration_s: float
    offered_rate: float
    sent_rate: float
    kept_up: bool
    schedule_lag_s: Distribution | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    goodput: float
    slo_ratio: float
    output_tokens_rate: float
    prompt_tokens_rate: float
    hit_ratio_actual: float | None
    hit_ratio_predicted: float | None
    predicted_exactly_ratio: float | None
    in_flight_imbalance: float | None


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token; None with an error or without a token."""
    if record.error is not None or record.first_token_s is None or record.sent_s is None:
        return None
    return record.first_token_s - record.sent_s


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time per output token after the first; None with an error or for one token."""
    if record.error is not None or record.first_token_s is None or record.output_tokens <= 1:
        return None
    return (record.token_times_s[-1] - record.first_token_s) / (record.output_tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    """Sending to last token; None with an error or without a token."""
    if record.error is not None or not record.token_times_s or record.sent_s is None:
        return None
    return record.token_times_s[-1] - record.sent_s


def predicted_hit_tokens(record: RequestRecord) -> int | None:
    """Hit tokens of the router's decision; None when it did not tell."""
    hit_tokens = None if record.decision is None else record.decision.get("hit_tokens")
    return hit_tokens if isinstance(hit_tokens, int) else None


def figures(records: Sequence[RequestRecord], slo: Slo | None = None) -> Figures:
    """All figures of a run; `slo` defaults to `Slo()`."""
    slo = slo or Slo()
    sent = [record for record in records if record.sent_s is not None]
    good = [record for record in records if record.error is None]
    sent_s = sorted(record.sent_s for record in sent if record.sent_s is not None)
    ends_s = [record.finished_s for record in sent if record.finished_s is not None]
    duration_s = max(ends_s) - sent_s[0] if ends_s else 0.0
    lag_s = Distribution.of([r.sent_s - r.scheduled_s for r in sent if r.sent_s is not None])
    met_count = sum(slo.met_by(record) for record in good)
    gaps_s = [b - a for record in good for a, b in pairwise(record.token_times_s)]
    told = [r for r in good if r.cached_tokens is not None]
    predicted = [r for r in good if predicted_hit_tokens(r) is not None]
    both = [r for r in told if predicted_hit_tokens(r) is not None]
    return Figures(
        requests_count=len(records),
        errors_count=len(records) - len(good),
        duration_s=duration_s,
        offered_rate=_rate(sorted(record.scheduled_s for record in records)),
        sent_rate=_rate(sent_s),
        kept_up=lag_s is not None and lag_s.p99 <= SCHEDULE_LAG_P99_MAX_S,
        schedule_lag_s=lag_s,
        ttft_s=Distribution.of([v for r in good if (v := ttft_s(r)) is not None]),
        tpot_s=Distribution.of([v for r in good if (v := tpot_s(r)) is not None]),
        itl_s=Distribution.of(gaps_s),
        e2e_s=Distribution.of([v for r in good if (v := e2e_s(r)) is not None]),
        goodput=_per(met_count, duration_s),
        slo_ratio=_per(met_count, len(records)),
        output_tokens_rate=_per(sum(r.output_tokens for r in good), duration_s),
        prompt_tokens_rate=_per(sum(r.prompt_tokens for r in good), duration_s),
        hit_ratio_actual=_ratio(
            sum(r.cached_tokens or 0 for r in told), sum(r.prompt_tokens for r in told)
        ),
        hit_ratio_predicted=_ratio(
            sum(predicted_hit_tokens(r) or 0 for r in predicted),
            sum(r.prompt_tokens for r in predicted),
        ),
        predicted_exactly_ratio=_ratio(
            sum(predicted_hit_tokens(r) == r.cached_tokens for r in both), len(both)
        ),
        in_flight_imbalance=_in_flight_imbalance(sent),
    )


def in_flight_steps(
    records: Sequence[RequestRecord],
) -> dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
    """Per instance (sorted) the moments at which its requests in flight change, and the new number.

    This is the batch size as the client sees it: from sending to the end of the answer.
    """
    changes: dict[str, list[tuple[float, int]]] = {}
    for record in records:
        if record.instance is None or record.sent_s is None or record.finished_s is None:
            continue
        changes.setdefault(record.instance, []).extend(
            ((record.sent_s, 1), (record.finished_s, -1))
        )
    steps = {}
    for instance in sorted(changes):
        # At equal moments ends come first, so that a hand-over does not look like two at once.
        moments_s, deltas = zip(*sorted(changes[instance]), strict=True)
        steps[instance] = (np.array(moments_s), np.cumsum(deltas))
    return steps


def rolling_hit_ratio(
    records: Sequence[RequestRecord], *, window_s: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Moments and, at each, the hit ratio of the window of `window_s` that ends there.

    A request counts at its first token. One point per request that tells its cached tokens.
    """
    told = sorted(
        (record.first_token_s, record.cached_tokens, record.prompt_tokens)
        for record in records
        if record.error is None
        and record.cached_tokens is not None
        and record.first_token_s is not None
    )
    if not told:
        return np.array([]), np.array([])
    moments_s, cached, prompts = (np.array(column, float) for column in zip(*told, strict=True))
    before = np.searchsorted(moments_s, moments_s - window_s, side="right")
    sum_cached = np.concatenate(([0.0], np.cumsum(cached)))
    sum_prompts = np.concatenate(([0.0], np.cumsum(prompts)))
    after = np.arange(1, len(told) + 1)
    ratios = (sum_cached[after] - sum_cached[before]) / (sum_prompts[after] - sum_prompts[before])
    return moments_s, ratios


def _in_flight_imbalance(records: Sequence[RequestRecord]) -> float | None:
    seconds: dict[str, float] = {}
    for record in records:
        if record.instance is None or record.sent_s is None or record.finished_s is None:
            continue
        busy_s = record.finished_s - record.sent_s
        seconds[record.instance] = seconds.get(record.instance, 0.0) + busy_s
    if not seconds or not sum(seconds.values()):
        return None
    return max(seconds.values()) * len(seconds) / sum(seconds.values())


def _rate(moments_s: Sequence[float]) -> float:
    """Events per second between the first and the last."""
    return _per(len(moments_s) - 1, moments_s[-1] - moments_s[0]) if len(moments_s) else 0.0


def _per(count: float, amount: float) -> float:
    return count / amount if amount > 0 else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
