"""Pure: the plots of the page, as plotly.js takes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, isfinite
from typing import Any

from loadgen.analysis.distributions import GAP_MIN_S, PERCENTS, Distribution
from loadgen.analysis.figures import ALL, CategoryFigures, TraceFigures

Trace = dict[str, Any]
COLOURS = 8  # the page has; further lines repeat them
_CATEGORIES_DRAWN = 6
_FIT_DRAWN_PERCENT = 99.99  # it never reaches 100
_DIGITS = 4  # a plot has no more pixels
_TIME_MIN_S = 1e-3  # a logarithmic axis has no zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plot with the words around it.

    Args:
        identity: of its element in the page.
        explanation: what is seen.
        layout: axes; the page adds fonts and colours.
        lines: each with its colour as `meta`, and where `by_trace`, of the trace of that place.
        by_trace: traces can be chosen in the page, categories cannot.
    """

    identity: str
    heading: str
    explanation: str
    layout: dict[str, Any]
    lines: list[Trace]
    by_trace: bool = True


def overview_charts(found: Mapping[str, TraceFigures]) -> list[Chart]:
    """The plots that have all traces."""
    return [
        _caches(found),
        _skew(found),
        _times(found, "gaps", "Reuse gaps", _GAPS, lambda one: one.categories[0].gaps_s),
        _times(found, "lives", "Block lifespans", _LIVES, lambda one: one.lifespan_of_reused_s),
        _working_set(found),
        _lengths(found),
        _turns(found),
    ]


def category_chart(identity: str, one: TraceFigures) -> Chart:
    """Gaps of a trace's largest categories, measured and fitted."""
    drawn = [category for category in one.categories if category.gaps_s.count][:_CATEGORIES_DRAWN]
    lines: list[Trace] = []
    for place, category in enumerate(drawn):
        lines.append(
            {
                **_line(category.name, place),
                **_cumulative(category.gaps_s, least=_TIME_MIN_S),
                "hovertemplate": "%{y:.0f} % within %{x:.3s}s",
            }
        )
        if category.fit is not None:
            lines.append(_fitted(category, place))
    return Chart(
        identity=identity,
        heading="Reuse gaps by type and turn",
        explanation=(
            "Share of reused blocks touched again within the time below; dotted is the exponential "
            f"fit of gaps of at least {GAP_MIN_S} s. A reuse counts for who touched the block last."
        ),
        layout=_log_time("gap"),
        lines=lines,
        by_trace=False,
    )


_GAPS = (
    "Time from a touch of a block to the next, by blocks: what an eviction policy has to outlast."
)
_LIVES = "Time from the first to the last touch of blocks that were reused at all."


def _caches(found: Mapping[str, TraceFigures]) -> Chart:
    lines = []
    for place, (name, one) in enumerate(found.items()):
        sizes = list(one.caches.capacity_tokens)
        for kind, ratios, dash in (
            ("LRU", one.caches.latest_use, "solid"),
            ("best possible", one.caches.best, "dash"),
        ):
            lines.append(
                {
                    **_line(f"{name}, {kind}", place, dash),
                    "x": sizes,
                    "y": _rounded([100 * ratio for ratio in ratios]),
                    "hovertemplate": "%{y:.1f} % with %{x:.3s} tokens",
                }
            )
    return Chart(
        identity="caches",
        heading="Hit ratio against cache size",
        explanation=(
            "Share of prompt tokens found in one KV$ of so many tokens that serves the whole "
            "trace; dashed is what the best order of eviction (Belady's) could have. Both end at "
            "the ideal, where nothing is evicted."
        ),
        layout={
            "xaxis": {"type": "log", "title": {"text": "cache (tokens)"}, "exponentformat": "SI"},
            "yaxis": {"title": {"text": "hit ratio (%)"}, "rangemode": "tozero"},
        },
        lines=lines,
    )


def _skew(found: Mapping[str, TraceFigures]) -> Chart:
    return Chart(
        identity="skew",
        heading="Reuse skew",
        explanation="Share of all reuses that fall on the most reused blocks.",
        layout={
            "xaxis": {"type": "log", "title": {"text": "most reused blocks (% of all)"}},
            "yaxis": {"title": {"text": "reuses (%)"}, "range": [0, 102], "dtick": 25},
        },
        lines=[
            {
                **_line(name, place),
                "x": _rounded([100 * ratio for ratio in one.skew.blocks_ratio[1:]]),
                "y": _rounded([100 * ratio for ratio in one.skew.reuses_ratio[1:]]),
                "hovertemplate": "%{y:.1f} % by %{x} % of the blocks",
            }
            for place, (name, one) in enumerate(found.items())
        ],
    )


def _times(
    found: Mapping[str, TraceFigures],
    identity: str,
    heading: str,
    explanation: str,
    of: Callable[[TraceFigures], Distribution],
) -> Chart:
    return Chart(
        identity=identity,
        heading=heading,
        explanation=explanation,
        layout=_log_time("time"),
        lines=[
            {
                **_line(name, place),
                **_cumulative(of(one), least=_TIME_MIN_S),
                "hovertemplate": "%{y:.0f} % within %{x:.3s}s",
            }
            for place, (name, one) in enumerate(found.items())
            if of(one).count
        ],
    )


def _working_set(found: Mapping[str, TraceFigures]) -> Chart:
    lines = []
    for place, (name, one) in enumerate(found.items()):
        whole_s = one.working_set[-1].end_s or 1.0
        for kind, values, dash in (
            ("seen so far", [moment.seen_tokens for moment in one.working_set], "dot"),
            ("touched", [moment.touched_tokens for moment in one.working_set], "solid"),
            ("wanted again", [moment.wanted_tokens for moment in one.working_set], "dash"),
        ):
            lines.append(
                {
                    **_line(f"{name}, {kind}", place, dash),
                    "x": _rounded([100 * moment.end_s / whole_s for moment in one.working_set]),
                    "y": [value or None for value in values],
                    "hovertemplate": "%{y:.3s} tokens at %{x:.0f} %",
                }
            )
    return Chart(
        identity="working-set",
        heading="Working set over time",
        explanation=(
            "Tokens of distinct blocks in each hundredth of the trace's time: touched (solid), "
            "touched before and again later (dashed: what a cache must hold for the ideal hit "
            "ratio), seen so far (dotted)."
        ),
        layout={
            "xaxis": {"title": {"text": "time (% of the trace)"}},
            "yaxis": {"type": "log", "title": {"text": "tokens"}, "exponentformat": "SI"},
        },
        lines=lines,
    )


def _lengths(found: Mapping[str, TraceFigures]) -> Chart:
    lines = []
    for place, (name, one) in enumerate(found.items()):
        for kind, lengths, dash in (
            ("prompt", one.prompt_lengths, "solid"),
            ("reused prefix", one.prefix_lengths, "dash"),
        ):
            lines.append(
                {
                    **_line(f"{name}, {kind}", place, dash),
                    **_cumulative(lengths, least=1),
                    "hovertemplate": "%{y:.0f} % within %{x:.3s} tokens",
                }
            )
    return Chart(
        identity="lengths",
        heading="Prompts and their reused prefixes",
        explanation=(
            "Share of requests whose prompt (solid), and whose prefix found in an infinite cache "
            "(dashed), is at most so long; nothing found is drawn at 1."
        ),
        layout={
            "xaxis": {"type": "log", "title": {"text": "tokens"}, "exponentformat": "SI"},
            "yaxis": {"title": {"text": "requests (%)"}, "range": [0, 102], "dtick": 25},
        },
        lines=lines,
    )


def _turns(found: Mapping[str, TraceFigures]) -> Chart:
    return Chart(
        identity="turns",
        heading="Turns per session",
        explanation="Share of sessions with at most so many requests in the trace.",
        layout={
            "xaxis": {"type": "log", "title": {"text": "requests of a session"}},
            "yaxis": {"title": {"text": "sessions (%)"}, "range": [0, 102], "dtick": 25},
        },
        lines=[
            {
                **_line(name, place),
                **_cumulative(one.turns_per_session, least=1),
                "hovertemplate": "%{y:.0f} % within %{x}",
            }
            for place, (name, one) in enumerate(found.items())
        ],
    )


def _fitted(category: CategoryFigures, place: int) -> Trace:
    fit = category.fit
    assert fit is not None, "the caller has looked"
    times_s = [max(GAP_MIN_S, 10 ** (power / 8)) for power in range(-4, 57)]
    short = 100 * (1 - fit.fitted_ratio)
    shares = [
        short - 100 * fit.fitted_ratio * expm1(-fit.rate_per_s * (time_s - GAP_MIN_S))
        for time_s in times_s
    ]
    shown = [at for at, share in enumerate(shares) if share < _FIT_DRAWN_PERCENT]
    return {
        **_line(f"{category.name}, fit", place, "dot"),
        "x": _rounded([times_s[at] for at in shown]),
        "y": _rounded([shares[at] for at in shown]),
        "hoverinfo": "skip",
    }


def _cumulative(one: Distribution, *, least: float) -> Trace:
    return {"x": _rounded([max(value, least) for value in one.percentiles]), "y": PERCENTS}


def _log_time(what: str) -> dict[str, Any]:
    ticks = {0.001: "1 ms", 0.01: "10 ms", 0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min"}
    ticks |= {600: "10 min", 3600: "1 h", 36000: "10 h", 86400: "1 d", 604800: "1 week"}
    return {
        "xaxis": {
            "type": "log",
            "title": {"text": what},
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
        },
        "yaxis": {"title": {"text": "blocks (%)"}, "range": [0, 102], "dtick": 25},
    }


def _line(name: str, place: int, dash: str = "solid") -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name.removesuffix(f", {ALL}"),
        "meta": place,
        "line": {"dash": dash, "width": 2},
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    """JSON has no NaN; plotly.js leaves a gap at null."""
    return [float(f"{value:.{_DIGITS}g}") if isfinite(value) else None for value in values]
