"""Pure: quantiles and exponential fits of values that count several times each."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GAP_MIN_S = 0.3
"""Shorter gaps are left out of fits: requests that come together, with one system prompt."""

PERCENTS = tuple(range(101))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A distribution in short.

    Attributes:
        count: values, each as often as it counts.
        mean: of them; 0 where there are none.
        percentiles: 0th to 100th, the least value that so many percent are at most; empty where
            there are none.
    """

    count: int
    mean: float
    percentiles: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialFit:
    """An exponential distribution from GAP_MIN_S on, by greatest likelihood.

    Attributes:
        rate_per_s: of it; its mean is GAP_MIN_S + 1 / rate.
        fitted_ratio: 0..1, how many of the values it is a fit of.
        ks_distance: 0..1, greatest distance of the cumulative distributions (Kolmogorov, Smirnov);
            under 0.05 hard to tell apart by eye, above 0.2 another shape.
        r_squared: share of the cumulative distribution's variance that the fit explains; 1 is
            exact, below 0 it is worse than a constant.
    """

    rate_per_s: float
    fitted_ratio: float
    ks_distance: float
    r_squared: float


def distribution(values: npt.ArrayLike, weights: Ints | None = None) -> Distribution:
    """The distribution of values, each counted `weights` times (once unless given)."""
    found = np.asarray(values, dtype=np.float64)
    counts = np.ones(len(found), np.int64) if weights is None else weights
    found, counts = found[counts > 0], counts[counts > 0]
    if not len(found):
        return Distribution(count=0, mean=0.0, percentiles=())
    order = np.argsort(found, kind="stable")
    reached = np.cumsum(counts[order])
    total = int(reached[-1])
    wanted = np.maximum(1, np.ceil(np.array(PERCENTS) / 100 * total))
    return Distribution(
        count=total,
        mean=float((found * counts).sum() / total),
        percentiles=tuple(found[order][np.searchsorted(reached, wanted)].tolist()),
    )


def exponential_fit(gaps_s: Floats, weights: Ints) -> ExponentialFit | None:
    """The fit of all gaps of at least GAP_MIN_S; None where they do not differ from that."""
    long = (gaps_s >= GAP_MIN_S) & (weights > 0)
    total = int(weights.sum())
    gaps, counts = gaps_s[long] - GAP_MIN_S, weights[long]
    mean_s = float((gaps * counts).sum() / counts.sum()) if len(gaps) else 0.0
    if mean_s <= 0:
        return None
    values, places = np.unique(gaps, return_inverse=True)
    weight = np.bincount(places, weights=counts)
    seen = np.cumsum(weight) / weight.sum()
    before = np.concatenate(([0.0], seen[:-1]))
    fitted = -np.expm1(-values / mean_s)
    middle = (seen + before) / 2  # of a step, which is what a smooth curve can come close to
    variance = float((weight * (middle - np.average(middle, weights=weight)) ** 2).sum())
    error = float((weight * (middle - fitted) ** 2).sum())
    return ExponentialFit(
        rate_per_s=1 / mean_s,
        fitted_ratio=float(counts.sum() / total),
        ks_distance=float(np.maximum(abs(seen - fitted), abs(before - fitted)).max()),
        r_squared=1 - error / variance if variance > 0 else 0.0,
    )
