"""Pure: the page's plots, as what plotly.js draws. Colours are the page's, by a line's place.

A trace says in `meta` which line it is (place among the matrix's series), and the page gives it
that line's colour in the scheme, light or dark, that the reader prefers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import Any

from loadgen.simulation.lab.report.cells import Cell, Matrix, Shape
from loadgen.simulation.lab.report.tables import percent

Trace = dict[str, Any]
COLOURS = 8  # the page has; further lines repeat them, dashed
_DASHES = ("solid", "dash", "dot", "dashdot")
_DENSE_DECADES_MAX = 3
_SHARES = tuple(range(101))
_DIGITS = 4  # a plot has no more pixels, and every digit is a hundred kilobytes of page


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plot with the words around it.

    Args:
        identity: of its element in the page.
        explanation: what is seen and which way is better.
        layout: axes; the page adds fonts and colours.
        traces: by load as `load_key` writes it; under "" when all loads are in one plot.
        by_series: its lines are the matrix's, which a reader chooses from in the page; else they
            are others, all shown with a legend of their own, and `meta` is a place among these.
    """

    identity: str
    heading: str
    explanation: str
    layout: dict[str, Any]
    traces: dict[str, list[Trace]]
    by_series: bool = True


def load_key(load: float) -> str:
    """A load as the page's controls name it."""
    return f"{load:g}"


def workload_charts(matrix: Matrix, workload: str, shape: Shape, prefix: str) -> Iterator[Chart]:
    """Every plot of a workload on a fleet that there is data for."""
    places = {load: matrix.at(workload, load, shape) for load in matrix.loads(workload)}
    places = {load: cells for load, cells in places.items() if cells}
    rank = {series: place for place, series in enumerate(matrix.series)}
    charts = (
        _distribution(places, rank, "ttft", "Time to first token", f"{prefix}-ttft"),
        _distribution(places, rank, "tpot", "Time per output token", f"{prefix}-tpot"),
        _goodput(places, rank, f"{prefix}-goodput"),
        _hit_ratio(places, rank, f"{prefix}-hits"),
        _imbalance(places, rank, f"{prefix}-imbalance"),
    )
    for chart in charts:
        if any(chart.traces.values()):
            yield chart


def _distribution(
    places: dict[float, list[Cell]], rank: dict[str, int], name: str, heading: str, identity: str
) -> Chart:
    """Cumulative, over a logarithmic axis."""

    def trace(cell: Cell) -> Trace | None:
        values = cell.quantiles(f"{name}_quantiles_s")
        # A logarithmic axis has no zero; a microsecond is less than anybody measures.
        seconds = [max(value, 1e-6) for value in values]
        return {"x": rounded(seconds), "y": _SHARES} if values else None

    traces = _by_load(places, rank, trace, "%{y:.0f} % within %{x:.3s}s")
    times_s = [time_s for own in traces.values() for one in own for time_s in one["x"]]
    ticks_s = log_ticks(times_s)

    return Chart(
        identity=identity,
        heading=heading,
        explanation=(
            f"Share of requests whose {name.upper()} is within the time below, on a logarithmic "
            "axis. Further left is faster; a line that bends late has a long tail. The mean of "
            "the seeds where there are several."
        ),
        layout={
            "xaxis": {
                "type": "log",
                "title": {"text": name.upper()},
                "tickvals": ticks_s,
                "ticktext": [seconds_text(tick_s) for tick_s in ticks_s],
            },
            "yaxis": {"title": {"text": "requests (%)"}, "range": [0, 102], "dtick": 25},
        },
        traces=traces,
    )


def _imbalance(places: dict[float, list[Cell]], rank: dict[str, int], identity: str) -> Chart:
    def trace(cell: Cell) -> Trace | None:
        points = cell.runs[0].imbalance_over_time
        if not points:
            return None
        times_s, ratios = zip(*points, strict=True)
        return {"x": rounded(times_s), "y": rounded(ratios)}

    return Chart(
        identity=identity,
        heading="Imbalance over time",
        explanation=(
            "Busy time of the busiest instance over the mean of all, in equal parts of the "
            "measured window. 1 is perfect balance; as high as there are instances means that "
            "one did all the work. Of the first seed."
        ),
        layout={
            "xaxis": {"title": {"text": "time in the window (s)"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "max / mean"}},
        },
        traces=_by_load(places, rank, trace, "%{y:.2f} at %{x:.0f} s"),
    )


def _goodput(places: dict[float, list[Cell]], rank: dict[str, int], identity: str) -> Chart:
    """Over the load, with the offered rate as a line to stay close to."""
    loads = list(places)
    offered = [places[load][0].mean("arriving_rps") for load in loads]
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "x": _percents(loads),
            "y": rounded(offered),
            "name": "offered",
            "meta": -1,
            "line": {"dash": "dot", "width": 1.5},
            "hovertemplate": "offered %{y:.3~g}/s<extra></extra>",
        }
    ]
    for series, cells in _lines(places, rank):
        spreads = [cell.spread("goodput_rps") * cell.mean("goodput_rps") for cell in cells]
        errors = {"type": "data", "array": rounded(spreads), "thickness": 1, "width": 3}
        traces.append(
            {
                **_line(series, rank[series]),
                "mode": "lines+markers",
                "x": _percents([cell.load for cell in cells]),
                "y": rounded([cell.mean("goodput_rps") for cell in cells]),
                **({"error_y": errors} if any(map(isfinite, spreads)) else {}),
                "hovertemplate": "%{y:.3~g}/s at %{x} %",
            }
        )
    return Chart(
        identity=identity,
        heading="Goodput against load",
        explanation=(
            "Requests a second that met the SLO, over the offered load as a share of capacity. "
            "Higher is better; the dotted line is what was to arrive in the measured window. Where "
            "answers take longer than the workload assumes follow-ups are late, and fewer arrive a "
            "second. Bars are the standard deviation over seeds."
        ),
        layout={
            "xaxis": {"title": {"text": "load (% of capacity)"}, "tickvals": _percents(loads)},
            "yaxis": {"title": {"text": "requests/s"}, "rangemode": "tozero"},
        },
        traces={"": traces},
    )


def _hit_ratio(places: dict[float, list[Cell]], rank: dict[str, int], identity: str) -> Chart:
    return Chart(
        identity=identity,
        heading="Hit ratio by policy and load",
        explanation=(
            "Share of prompt tokens that the engines found in their KV$. More is less to "
            "compute, and not by itself better: what is gained in hits may be lost in waiting."
        ),
        layout={
            "barmode": "group",
            "xaxis": {"title": {"text": "load"}, "type": "category"},
            "yaxis": {"title": {"text": "hit ratio (%)"}, "rangemode": "tozero"},
        },
        traces={
            "": [
                {
                    "type": "bar",
                    "name": series,
                    "meta": rank[series],
                    "marker": {"pattern": {"shape": "/" if rank[series] >= COLOURS else ""}},
                    "x": [percent(cell.load) for cell in cells],
                    "y": rounded([100 * cell.mean("hit_ratio") for cell in cells]),
                    "hovertemplate": "%{y:.1f} %",
                }
                for series, cells in _lines(places, rank)
            ]
        },
    )


def _by_load(
    places: dict[float, list[Cell]],
    rank: dict[str, int],
    trace: Callable[[Cell], Trace | None],
    hover: str,
) -> dict[str, list[Trace]]:
    return {
        load_key(load): [
            {
                **_line(cell.series, rank[cell.series]),
                "mode": "lines",
                "hovertemplate": hover,
                **own,
            }
            for cell in cells
            if (own := trace(cell)) is not None
        ]
        for load, cells in places.items()
    }


def _lines(
    places: dict[float, list[Cell]], rank: dict[str, int]
) -> Iterator[tuple[str, list[Cell]]]:
    """A policy's cells over the loads."""
    found: dict[str, list[Cell]] = {}
    for cells in places.values():
        for cell in cells:
            found.setdefault(cell.series, []).append(cell)
    for series in sorted(found, key=lambda name: rank[name]):
        yield series, found[series]


def _line(series: str, place: int) -> Trace:
    dash = _DASHES[place // COLOURS % len(_DASHES)]
    return {
        "type": "scatter",
        "name": series,
        "meta": place,
        "line": {"dash": dash, "width": 3 if place == 0 else 2},
    }


def log_ticks(values: Sequence[float]) -> list[float]:
    """Round values from the least to the greatest, fewer a decade when there are many decades."""
    if not values:
        return []
    first, last = floor(log10(min(values))), ceil(log10(max(values)))
    steps = (1, 2, 5) if last - first <= _DENSE_DECADES_MAX else (1,)
    return [float(f"{step}e{power}") for power in range(first, last + 1) for step in steps]


def seconds_text(seconds: float) -> str:
    """In the unit that suits it."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:,.0f} {unit}"
    return f"{seconds / 1e-6:,.0f} µs"


def _percents(loads: Sequence[float]) -> list[float]:
    return [float(f"{100 * load:.6g}") for load in loads]


def rounded(values: Sequence[float]) -> list[float | None]:
    """JSON has no NaN; plotly.js leaves a gap at null."""
    return [float(f"{value:.{_DIGITS}g}") if isfinite(value) else None for value in values]
