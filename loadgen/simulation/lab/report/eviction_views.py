"""Pure: the page's part on eviction policies: tables, and plots against the size of the cache."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from loadgen.simulation.lab.report.charts import COLOURS, Chart, log_ticks, rounded, seconds_text
from loadgen.simulation.lab.report.evictions import LRU, EvictionRow, cache_columns
from loadgen.simulation.lab.report.tables import percent, signed_percent

_DASHES = ("solid", "dash", "dot")
_COMPARED_MIN = 2  # one alone is no axis
_RANGE_LOGARITHMIC = 4.0  # from the shortest to the longest time


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """A figure of one policy.

    Args:
        text: with its unit.
        difference: from LRU in the same column, "+12 %"; empty for LRU itself and where unknown.
        heat: 1 the best of the table, 0 the worst.
    """

    text: str
    difference: str
    heat: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """A policy of eviction; None where it was not run."""

    policy: str
    cells: tuple[GridCell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One figure: eviction policies against caches, or against routing policies."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[GridRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionView:
    """One workload under one load.

    Args:
        heading: which, and what the columns have in common.
        charts: the same over the size of the cache; none of a single size.
    """

    heading: str
    grids: tuple[Grid, ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """What is shown of a row.

    Args:
        better: +1 more is better, -1 less.
        drawn: of a value, on the plot's axis.
    """

    name: str
    caption: str
    better: int
    value: Callable[[EvictionRow], float]
    gain: Callable[[EvictionRow], float]
    text: Callable[[float], str]
    drawn: Callable[[float], float]
    hover: str
    explanation: str


_FIGURES = (
    _Figure(
        name="hits",
        caption="Hit ratio",
        better=1,
        value=lambda row: row.hit_ratio,
        gain=lambda row: row.hit_ratio_gain,
        text=lambda ratio: f"{100 * ratio:.1f} %",
        drawn=lambda ratio: 100 * ratio,
        hover="%{y:.1f} % with %{x:,} blocks",
        explanation=(
            "Share of prompt tokens found in the cache, over its size in blocks for each instance. "
            "Lines meet where the cache is ample."
        ),
    ),
    _Figure(
        name="ttft",
        caption="Queued TTFT, mean",
        better=-1,
        value=lambda row: row.queued_ttft_mean_s,
        gain=lambda row: row.queued_ttft_gain,
        text=lambda seconds: f"{1000 * seconds:,.0f} ms",
        drawn=lambda seconds: seconds,
        hover="%{y:.3s}s with %{x:,} blocks",
        explanation=(
            "From arrival to first token, over the same sizes. Where the cache is too small for "
            "the load, requests queue, and a few hits more save much."
        ),
    ),
)


def eviction_views(rows: Sequence[EvictionRow]) -> list[EvictionView]:
    """By workload and load: against caches for each routing policy, and against routing policies.

    The latter for each cache under which several were run. Of one cache and one routing policy a
    table with one column is left; where one eviction policy was run, nothing.
    """
    views: list[EvictionView] = []
    places = dict.fromkeys((row.workload, row.load) for row in rows)
    for number, (workload, load) in enumerate(places):
        here = [row for row in rows if (row.workload, row.load) == (workload, load)]
        if len({row.policy for row in here}) < _COMPARED_MIN:
            continue
        views += _place_views(f"{workload}, load {percent(load)}", here, f"e{number}")
    return views


def _place_views(
    heading: str, rows: Sequence[EvictionRow], identity: str
) -> Iterator[EvictionView]:
    caches = cache_columns(rows)
    routings = {row.routing: row.routing for row in rows}
    for place, routing in enumerate(routings):
        here = [row for row in rows if row.routing == routing]
        columns = cache_columns(here)
        if len(columns) >= _COMPARED_MIN or len(routings) < _COMPARED_MIN:
            yield EvictionView(
                heading=f"{heading}, routed by {routing}",
                grids=_grids(here, columns, lambda row: row.column),
                charts=_charts(here, f"{identity}-{place}"),
            )
    if len(routings) >= _COMPARED_MIN:
        for column, cache in caches.items():
            here = [row for row in rows if row.column == column]
            yield EvictionView(
                heading=f"{heading}, {cache}: eviction and routing",
                grids=_grids(here, routings, lambda row: row.routing),
                charts=(),
            )


def _grids(
    rows: Sequence[EvictionRow],
    columns: Mapping[Any, str],
    column_of: Callable[[EvictionRow], Hashable],
) -> tuple[Grid, ...]:
    found = {(row.policy, column_of(row)): row for row in rows}
    policies = dict.fromkeys(row.policy for row in rows)
    grids = []
    for figure in _FIGURES:
        values = [figure.value(row) for row in rows if isfinite(figure.value(row))]
        worst, best = sorted((min(values, default=0.0), max(values, default=0.0)))[:: figure.better]
        table = [
            GridRow(
                policy=policy,
                cells=tuple(
                    _cell(found.get((policy, column)), figure, worst, best) for column in columns
                ),
            )
            for policy in policies
        ]
        grids.append(
            Grid(caption=figure.caption, columns=tuple(columns.values()), rows=tuple(table))
        )
    return tuple(grids)


def _cell(row: EvictionRow | None, figure: _Figure, worst: float, best: float) -> GridCell | None:
    if row is None or isnan(figure.value(row)):
        return None
    value = figure.value(row)
    return GridCell(
        text=figure.text(value),
        difference="" if row.policy == LRU else signed_percent(figure.gain(row)),
        heat=(value - worst) / (best - worst) if best != worst else 0.0,
    )


def _charts(rows: Sequence[EvictionRow], identity: str) -> tuple[Chart, ...]:
    """None where sizes are not what caches differ by."""
    sizes = sorted({row.cache_blocks for row in rows})
    if not _COMPARED_MIN <= len(sizes) == len({row.column for row in rows}):
        return ()
    return tuple(_chart(rows, sizes, figure, f"{identity}-{figure.name}") for figure in _FIGURES)


def _chart(
    rows: Sequence[EvictionRow], sizes: Sequence[int], figure: _Figure, identity: str
) -> Chart:
    traces: list[dict[str, Any]] = []
    for place, policy in enumerate(dict.fromkeys(row.policy for row in rows)):
        own = sorted(
            (row for row in rows if row.policy == policy), key=lambda row: row.cache_blocks
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": policy,
                "meta": place,
                "line": {"dash": _DASHES[place // COLOURS % len(_DASHES)], "width": 2},
                "x": [row.cache_blocks for row in own],
                "y": rounded([figure.drawn(figure.value(row)) for row in own]),
                "hovertemplate": figure.hover,
            }
        )
    return Chart(
        identity=identity,
        heading=f"{figure.caption} against cache size",
        explanation=figure.explanation,
        layout={
            "xaxis": {
                "type": "log",
                "title": {"text": "blocks of each instance"},
                "tickvals": list(sizes),
                "ticktext": [f"{size:,}" for size in sizes],
            },
            "yaxis": _axis(figure, [y for trace in traces for y in trace["y"] if y]),
        },
        traces={"": traces},
        by_series=False,
    )


def _axis(figure: _Figure, values: Sequence[float]) -> dict[str, Any]:
    if figure.better > 0:
        return {"title": {"text": "hit ratio (%)"}, "rangemode": "tozero"}
    if max(values, default=0.0) < _RANGE_LOGARITHMIC * min(values, default=0.0):
        return {"title": {"text": "TTFT, mean (s)"}, "rangemode": "tozero"}
    ticks_s = log_ticks(values)
    return {
        "type": "log",
        "title": {"text": "TTFT, mean"},
        "tickvals": ticks_s,
        "ticktext": [seconds_text(tick_s) for tick_s in ticks_s],
    }
