"""What one run of the policy lab amounts to. Pure.

TTFT counts from arrival at the router to the first token, TPOT is (last token - first token) /
(output tokens - 1), undefined for one token. Requests count whose nominal arrival is in
the measured window: the same ones for every policy.
A figure nothing was measured of is NaN, and null in JSON.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from loadgen.metrics import Slo

Floats = npt.NDArray[np.float64]

CHAT_SLO = Slo()
"""TTFT within 1 s + 62.5 ms per 1,000 prompt tokens, TPOT within 50 ms."""

AGENT_SLO = Slo(tpot_s=0.020)
"""The same, TPOT within 20 ms."""

PERCENTILES = np.arange(101)
IMBALANCE_POINTS_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKey:
    """Which run it is.

    Args:
        load: offered rate over the fleet's capacity; 1.1 is past saturation.
        instances: number of them in the fleet.
        routers: number of them in front of it.
        staleness_s: how long it takes a router to see what the others did.
        variant: what else differs from the plain fleet or policy ("tier"); else empty. Names the
            eviction policy, too, where that is not the engine's own.
        eviction: policy of the instances' caches.
    """

    workload: str
    load: float
    policy: str
    instances: int
    routers: int
    staleness_s: float
    seed: int
    variant: str = ""
    eviction: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures(RunKey):
    """Figures of the requests that arrived in the measured window, and what the run cost.

    Args:
        goodput_rps: requests a second of the window that met the SLO.
        goodput_tokens_per_s: prompt and output tokens of those.
        prompt_tokens_per_s: prompt tokens of all requests served.
        hit_ratio: sum of hit tokens over sum of prompt tokens of the requests served, as the
            engines found them.
        tier_hit_ratio: likewise, tokens that the engines loaded from a tier; they are no hits.
        imbalance: largest over mean of the instances' busy time; 1 when nobody was busy. Where
            prefill and decode are apart, of the pool where it is larger.
        requests: arrived in the window, lost ones included.
        offered_rps: requests a second that the load asked for.
        arriving_rps: requests a second that were to arrive in the window, by the workload's own
            times: with sessions, or at the edges of a trace, not the same.
        arriving_drift: those of the window's second half over those of its first; 1 is steady.
        ttft_drift: mean TTFT of the requests of the second half over that of the first; well above
            1 the fleet falls behind, and means depend on how long the run is.
        slo_ratio: requests that met the SLO, over all.
        lost: requests that were refused or never ended.
        cpu_s: processor time of the run.
        virtual_s: virtual time that passed in it.
        ttft_quantiles_s: percentiles 0 to 100; empty when no request was served.
        tpot_quantiles_s: likewise.
        capacity_blocks: of each instance's cache.
        imbalance_over_time: (seconds since the window's start, imbalance around then).
    """

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    tpot_p99_s: float
    goodput_rps: float
    goodput_tokens_per_s: float
    prompt_tokens_per_s: float
    hit_ratio: float
    imbalance: float
    requests: int
    offered_rps: float
    slo_ratio: float
    lost: int
    cpu_s: float
    virtual_s: float
    ttft_quantiles_s: tuple[float, ...]
    tpot_quantiles_s: tuple[float, ...]
    imbalance_over_time: tuple[tuple[float, float], ...]
    tier_hit_ratio: float = 0.0
    arriving_rps: float = float("nan")
    arriving_drift: float = float("nan")
    ttft_drift: float = float("nan")
    capacity_blocks: int = 0

    @property
    def key(self) -> RunKey:
        """Which run it is."""
        return RunKey(**{field.name: getattr(self, field.name) for field in fields(RunKey)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """A column per property, one entry per request; NaN where a request was lost.

    Args:
        nominal_s: when it would arrive if answers took the time that the workload assumes: in
            closed loop slow answers make follow-ups late, and still the same requests have to
            count for every policy. Those that never came have no arrival.
        slot: index of the instance that served it; anything for a lost one.
        tier_hit_tokens: loaded from a tier; None: there is none.
    """

    nominal_s: Floats
    arrived_s: Floats
    first_token_s: Floats
    ended_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    hit_tokens: Floats
    slot: npt.NDArray[np.int64]
    tier_hit_tokens: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySamples:
    """How long each instance was busy since the start, now and then.

    Args:
        at_s: ascending times.
        busy_s: a row per time, a column per instance; linear in between.
        prefill_instances: the first so many only prefill and the others only decode; 0: all do
            both.
    """

    at_s: Floats
    busy_s: Floats
    prefill_instances: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is measured: requests whose nominal arrival is from `from_s` on, before `to_s`."""

    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Of a distribution."""

    mean: float = float("nan")
    p50: float = float("nan")
    p95: float = float("nan")
    p99: float = float("nan")

    @classmethod
    def of(cls, values_s: Floats) -> "_Parts":
        if not len(values_s):
            return cls()
        p50, p95, p99 = (float(one) for one in np.percentile(values_s, (50, 95, 99)))
        return cls(mean=float(values_s.mean()), p50=p50, p95=p95, p99=p99)


def figures(
    key: RunKey,
    requests: Requests,
    busy: BusySamples,
    window: Window,
    *,
    slo: Slo,
    offered_rps: float,
    cpu_s: float,
    virtual_s: float,
) -> RunFigures:
    """Measure a run, which has to last until every request has ended: what has not is lost."""
    assert window.to_s > window.from_s, window
    arrived = (requests.nominal_s >= window.from_s) & (requests.nominal_s < window.to_s)
    latest_s = float(np.max(requests.arrived_s[arrived], initial=window.to_s))
    length_s = latest_s - window.from_s  # whoever makes requests late has served fewer a second
    served = arrived & np.isfinite(requests.ended_s)
    slots = requests.slot[served]
    assert ((slots >= 0) & (slots < busy.busy_s.shape[1])).all(), "served by no instance"
    prompts, outputs = requests.prompt_tokens[served], requests.output_tokens[served]
    ttft_s = requests.first_token_s[served] - requests.arrived_s[served]
    gaps = outputs - 1
    decode_s = requests.ended_s[served] - requests.first_token_s[served]
    tpot_s = decode_s[gaps > 0] / gaps[gaps > 0]
    bound_s = slo.ttft_s + slo.ttft_per_1000_prompt_tokens_s * prompts / 1000
    met = (ttft_s <= bound_s) & (decode_s <= slo.tpot_s * gaps)
    count = int(arrived.sum())
    ttft, tpot = _Parts.of(ttft_s), _Parts.of(tpot_s)
    late = requests.nominal_s >= (window.from_s + window.to_s) / 2
    late_count = int((arrived & late).sum())
    named = {field.name: getattr(key, field.name) for field in fields(RunKey)}
    return RunFigures(
        **named,
        ttft_mean_s=ttft.mean,
        ttft_p50_s=ttft.p50,
        ttft_p95_s=ttft.p95,
        ttft_p99_s=ttft.p99,
        tpot_mean_s=tpot.mean,
        tpot_p50_s=tpot.p50,
        tpot_p95_s=tpot.p95,
        tpot_p99_s=tpot.p99,
        goodput_rps=int(met.sum()) / length_s,
        goodput_tokens_per_s=float((prompts + outputs)[met].sum()) / length_s,
        prompt_tokens_per_s=float(prompts.sum()) / length_s,
        hit_ratio=_over(float(requests.hit_tokens[served].sum()), float(prompts.sum())),
        tier_hit_ratio=_tier_hit_ratio(requests, served),
        imbalance=_imbalances(busy, np.array([window.from_s, window.to_s]))[0],
        requests=count,
        offered_rps=offered_rps,
        arriving_rps=count / (window.to_s - window.from_s),
        arriving_drift=_over(late_count, count - late_count),
        ttft_drift=_over(_mean(ttft_s[late[served]]), _mean(ttft_s[~late[served]])),
        slo_ratio=_over(int(met.sum()), count),
        lost=count - int(served.sum()),
        cpu_s=cpu_s,
        virtual_s=virtual_s,
        ttft_quantiles_s=_quantiles(ttft_s),
        tpot_quantiles_s=_quantiles(tpot_s),
        imbalance_over_time=_over_time(busy, window),
    )


def _tier_hit_ratio(requests: Requests, served: npt.NDArray[np.bool_]) -> float:
    if requests.tier_hit_tokens is None:
        return 0.0
    loaded = float(requests.tier_hit_tokens[served].sum())
    return _over(loaded, float(requests.prompt_tokens[served].sum()))


def _mean(values_s: Floats) -> float:
    return float(values_s.mean()) if len(values_s) else float("nan")


def _quantiles(values_s: Floats) -> tuple[float, ...]:
    if not len(values_s):
        return ()
    return tuple(float(one) for one in np.percentile(values_s, PERCENTILES))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _imbalances(busy: BusySamples, edges_s: Floats) -> list[float]:
    """Largest over mean of the busy times between neighbouring edges, of the worst pool."""
    columns = [np.interp(edges_s, busy.at_s, column) for column in busy.busy_s.T]
    spent_s, first = np.diff(np.array(columns), axis=1), busy.prefill_instances
    pools = (spent_s[:first], spent_s[first:]) if first else (spent_s,)
    return [max(ratios) for ratios in zip(*map(_pool_imbalances, pools), strict=True)]


def _pool_imbalances(spent_s: Floats) -> list[float]:
    means_s = spent_s.mean(axis=0)
    idle = means_s <= 0
    ratios = np.where(idle, 1.0, spent_s.max(axis=0) / np.where(idle, 1.0, means_s))
    return [float(ratio) for ratio in ratios]


def _over_time(busy: BusySamples, window: Window) -> tuple[tuple[float, float], ...]:
    """Equal parts of the window, no finer than the samples are."""
    inside = int(((busy.at_s >= window.from_s) & (busy.at_s <= window.to_s)).sum())
    parts = min(IMBALANCE_POINTS_MAX, inside - 1)
    if parts < 1:
        return ()
    edges_s = np.linspace(window.from_s, window.to_s, parts + 1)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2 - window.from_s
    pairs = zip(middles_s, _imbalances(busy, edges_s), strict=True)
    return tuple((float(at_s), ratio) for at_s, ratio in pairs)
