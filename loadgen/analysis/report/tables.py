"""Pure: the figures of traces as texts."""

from collections.abc import Callable
from dataclasses import dataclass

from loadgen.analysis.distributions import Distribution
from loadgen.analysis.figures import CategoryFigures, TraceFigures

NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure of a table.

    Attributes:
        label: heading.
        text: of a row, as it is read.
        value: of a row, to sort by.
    """

    label: str
    text: Callable[[TraceFigures], str]
    value: Callable[[TraceFigures], float]


def percent(ratio: float) -> str:
    """0..1 as a percentage of three digits at least where there are any."""
    return f"{100 * ratio:.1f} %"


def amount(count: float) -> str:
    """A count or length with its magnitude: 950, 12.3 k, 4.56 M."""
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.4g}"


def duration(seconds: float) -> str:
    """A time in the unit that a person would choose."""
    for scale, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 1.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.2g} s"


def percentile(one: Distribution, place: int) -> float:
    """0 where there are no values."""
    return one.percentiles[place] if one.percentiles else 0.0


def _ratio(label: str, of: Callable[[TraceFigures], float]) -> Column:
    return Column(label=label, text=lambda one: percent(of(one)), value=of)


def _amount(label: str, of: Callable[[TraceFigures], float]) -> Column:
    return Column(label=label, text=lambda one: amount(of(one)), value=of)


def _time(label: str, of: Callable[[TraceFigures], float]) -> Column:
    return Column(label=label, text=lambda one: duration(of(one)), value=of)


def _own_session(one: TraceFigures) -> float:
    kinds = (one.single_turn, one.multi_turn)
    return sum(kind.reuse_ratio * kind.own_session_ratio for kind in kinds)


OVERVIEW = (
    _amount("requests", lambda one: one.requests),
    _amount("sessions", lambda one: one.sessions),
    _time("duration", lambda one: one.duration_s),
    _amount("prompt, median", lambda one: percentile(one.prompt_lengths, 50)),
    _ratio("ideal hit ratio", lambda one: one.ideal_hit_ratio),
    _ratio("reuses by top 1 % of blocks", lambda one: one.skew.top_1_percent),
    _ratio("by top 10 %", lambda one: one.skew.top_10_percent),
    _ratio("blocks never reused", lambda one: one.skew.never_reused_ratio),
    _ratio("single-turn requests", lambda one: one.single_turn.requests_ratio),
    _ratio("reuse by these", lambda one: one.single_turn.reuse_ratio),
    _ratio("reuse of own session", _own_session),
    _time("reuse gap, median", lambda one: percentile(one.categories[0].gaps_s, 50)),
    _time("lifespan of reused, median", lambda one: percentile(one.lifespan_of_reused_s, 50)),
    _amount("all blocks (tokens)", lambda one: one.working_set[-1].seen_tokens),
    _amount("90 % of ideal, LRU (tokens)", lambda one: one.caches.latest_use_tokens["90%"]),
)
"""Columns of the table of traces."""


CATEGORY_HEADS = (
    "type and turn",
    "requests",
    "blocks",
    "reused later",
    "gap, median",
    "gap, P90",
    "fit: mean gap",
    "KS distance",
    "R²",
)
"""Headings of the table of categories."""


def category_cells(one: CategoryFigures) -> tuple[str, ...]:
    """The texts of a row under CATEGORY_HEADS."""
    fit = one.fit
    gaps = (
        (duration(percentile(one.gaps_s, 50)), duration(percentile(one.gaps_s, 90)))
        if one.gaps_s.count
        else (NONE, NONE)
    )
    fitted = (
        (NONE, NONE, NONE)
        if fit is None
        else (duration(1 / fit.rate_per_s), f"{fit.ks_distance:.3f}", f"{fit.r_squared:.3f}")
    )
    return (
        one.name,
        f"{one.requests:,}",
        f"{one.blocks:,}",
        percent(one.reused_ratio),
        *gaps,
        *fitted,
    )
