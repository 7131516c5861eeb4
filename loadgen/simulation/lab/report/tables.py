"""Rows of the tables, for a console and a browser alike. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, nan
from statistics import fmean

from loadgen.report import NOT_KNOWN
from loadgen.simulation.lab.report.cells import (
    BASELINE,
    Cell,
    Matrix,
    Shape,
    baseline_of,
    difference,
)

_MS = 1000.0
_WHOLE_FROM = 100  # from here on decimals say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How a figure is shown.

    Args:
        figure: field of RunFigures.
        better: -1 when lower is better, +1 when higher is, 0 when neither.
        scale: shown value over the field's.
        short: heading of the console's table, which says its difference where `compared`.
    """

    label: str
    short: str
    figure: str
    digits: int
    better: int = 0
    scale: float = 1.0
    compared: bool = False

    def text(self, value: float) -> str:
        """A value of the field as it is shown."""
        if not isfinite(value):
            return NOT_KNOWN
        shown = value * self.scale
        return f"{shown:,.{0 if abs(shown) >= _WHOLE_FROM else self.digits}f}"


def _times(name: str, field: str, compared: tuple[str, ...]) -> list[Column]:
    return [
        Column(
            label=f"{name} {label} (ms)",
            short=f"{name} {label}",
            figure=f"{field}_{label.lower()}_s",
            digits=1,
            better=-1,
            scale=_MS,
            compared=label in compared,
        )
        for label in ("mean", "P50", "P95", "P99")
    ]


COLUMNS = (
    *_times("TTFT", "ttft", ("mean",)),
    *_times("TPOT", "tpot", ("mean",)),
    Column(
        label="goodput (requests/s)",
        short="good /s",
        figure="goodput_rps",
        digits=2,
        better=1,
        compared=True,
    ),
    Column(
        label="met the SLO (%)", short="SLO %", figure="slo_ratio", digits=1, better=1, scale=100
    ),
    Column(label="hit ratio (%)", short="hit %", figure="hit_ratio", digits=1, better=1, scale=100),
    Column(
        label="loaded from a tier (%)", short="tier %", figure="tier_hit_ratio", digits=1, scale=100
    ),
    Column(
        label="imbalance, max/mean (x)", short="max/ mean", figure="imbalance", digits=2, better=-1
    ),
    Column(label="TTFT, second half / first (x)", short="2nd/ 1st", figure="ttft_drift", digits=2),
    Column(label="requests", short="requests", figure="requests", digits=0),
    Column(label="lost", short="lost", figure="lost", digits=0, better=-1),
)

_WHERE_ANY = ("tier_hit_ratio", "lost")

OVERVIEW_FIGURES = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "goodput_rps", "hit_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One figure of one policy.

    Args:
        text: the mean over seeds.
        value: behind the text, to sort by.
        ratio: difference to the baseline; NaN for the baseline itself and where unknown.
        difference: the same in words, "+12 %", or empty.
        good: +1 when the difference is to the better, -1 to the worse, 0 within half a percent.
        spread: of the seeds, "3 %"; empty of one seed.
        best: of the column, among rows of the same variant.
    """

    text: str
    value: float
    ratio: float = nan
    difference: str = ""
    good: int = 0
    spread: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy."""

    series: str
    variant: str
    entries: tuple[Entry, ...]


def rates(cells: Sequence[Cell]) -> str:
    """What was asked of the fleet, in words: nominally, in the window, and whether steadily."""
    nominal = fmean(cell.mean("offered_rps") for cell in cells)
    arriving, drift = (cells[0].mean(name) for name in ("arriving_rps", "arriving_drift"))
    text = f"{nominal:.3g} requests/s"
    if not isfinite(arriving):
        return text
    steady = f", {signed_percent(drift - 1)} in its second half" if isfinite(drift) else ""
    return f"{text}; in the window {arriving:.3g}{steady}"


def telling(cells: Sequence[Cell], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Without the columns that are nought for all, and say so by their absence."""
    return [
        column
        for column in columns
        if column.figure not in _WHERE_ANY or any(cell.mean(column.figure) for cell in cells)
    ]


def comparison(cells: Sequence[Cell], columns: Sequence[Column] = COLUMNS) -> list[Row]:
    """A row per cell: figures, differences to the baseline, the best of each column marked."""
    return [
        Row(
            series=cell.series,
            variant=cell.variant,
            entries=tuple(_entry(cell, cells, column) for column in columns),
        )
        for cell in cells
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One figure of every policy but the baseline against it, over all workloads and loads.

    Args:
        places: (workload, load) of each column.
        rows: differences, and last the geometric mean over the columns as a difference.
    """

    column: Column
    places: tuple[tuple[str, float], ...]
    rows: tuple[Row, ...]


def overview(matrix: Matrix, shape: Shape, column: Column) -> Overview:
    """How far each policy is from the baseline, everywhere."""
    places = tuple(
        (workload, load)
        for workload in matrix.workloads
        for load in matrix.loads(workload)
        if matrix.at(workload, load, shape)
    )
    differences: dict[str, list[float]] = {}
    variants: dict[str, str] = {}
    for place, (workload, load) in enumerate(places):
        cells = matrix.at(workload, load, shape)
        for cell in cells:
            row = differences.setdefault(cell.series, [nan] * len(places))
            row[place] = difference(cell, baseline_of(cell, cells), column.figure)
            variants[cell.series] = cell.variant
    rows = [
        Row(
            series=series,
            variant=variants[series],
            entries=tuple(
                _difference_entry(value, column)
                for value in (*differences[series], _geometric_mean(differences[series]))
            ),
        )
        for series in matrix.series
        if series in differences and series != BASELINE
    ]
    return Overview(column=column, places=places, rows=tuple(rows))


def percent(ratio: float) -> str:
    """A load in words: 0.5 -> "50 %"."""
    return f"{100 * ratio:.3g} %"


def signed_percent(ratio: float) -> str:
    """A difference in words: -0.123 -> "-12 %"; NaN -> empty."""
    if not isfinite(ratio):
        return ""
    return f"{100 * ratio:+z,.1f} %" if abs(ratio) < 0.0995 else f"{100 * ratio:+z,.0f} %"  # noqa: PLR2004


def by_shape(cells: Sequence[Cell], column: Column) -> list[Entry]:
    """One policy on several fleets: the figure, with its difference to that on the first."""
    return [
        Entry(
            text=column.text(cell.mean(column.figure)),
            value=cell.mean(column.figure),
            difference=""
            if cell is cells[0]
            else signed_percent(difference(cell, cells[0], column.figure)),
            good=_good(difference(cell, cells[0], column.figure), column),
        )
        for cell in cells
    ]


def _entry(cell: Cell, cells: Sequence[Cell], column: Column) -> Entry:
    value = cell.mean(column.figure)
    baseline = baseline_of(cell, cells)
    ratio = nan if baseline is cell else difference(cell, baseline, column.figure)
    spread = cell.spread(column.figure)
    return Entry(
        text=column.text(value),
        value=value,
        ratio=ratio,
        difference=signed_percent(ratio) if column.better else "",
        good=_good(ratio, column),
        spread=signed_percent(spread).lstrip("+") if column.better else "",
        best=_is_best(cell, cells, column),
    )


def _is_best(cell: Cell, cells: Sequence[Cell], column: Column) -> bool:
    """Among at least two of one variant that do not all read the same: a tier is no policy."""
    if not column.better:
        return False
    alike = [other for other in cells if other.variant == cell.variant]
    values = [column.better * other.mean(column.figure) for other in alike]
    texts = {column.text(other.mean(column.figure)) for other in alike}
    known = [value for value in values if isfinite(value)]
    return len(texts) > 1 and bool(known) and column.better * cell.mean(column.figure) == max(known)


def _difference_entry(ratio: float, column: Column) -> Entry:
    text = signed_percent(ratio) or NOT_KNOWN
    return Entry(text=text, value=ratio, good=_good(ratio, column))


def _good(ratio: float, column: Column) -> int:
    if not isfinite(ratio) or abs(ratio) < 0.005:  # noqa: PLR2004  # not visible in print
        return 0
    return 1 if ratio * column.better > 0 else -1


def _geometric_mean(ratios: Sequence[float]) -> float:
    known = [ratio for ratio in ratios if isfinite(ratio) and ratio > -1]
    return exp(fmean(log(1 + ratio) for ratio in known)) - 1 if known else nan
