"""Pure: figures of several runs side by side, as a table for people and as JSON for programs."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.markup import escape
from rich.table import Table

from loadgen.metrics import Distribution, Figures, Slo, figures
from loadgen.records import Run

NOT_KNOWN = "-"
_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One figure of every run.

    Args:
        label: what it is, with its unit.
        cells: text per run.
        best: index of the best run where better has a meaning and runs differ; else None.
    """

    label: str
    cells: tuple[str, ...]
    best: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """How a figure is shown. `better` is -1 when lower is better, +1 when higher is, else 0."""

    label: str
    value: Callable[[Figures], float | None]
    digits: int
    better: int = 0
    scale: float = 1.0


def _part_of(
    pick: Callable[[Figures], Distribution | None], part: Callable[[Distribution], float]
) -> Callable[[Figures], float | None]:
    def value(run: Figures) -> float | None:
        distribution = pick(run)
        return None if distribution is None else part(distribution)

    return value


def _times(name: str, pick: Callable[[Figures], Distribution | None]) -> list[_Column]:
    """Mean and percentiles of a time, in milliseconds."""
    parts: dict[str, Callable[[Distribution], float]] = {
        "mean": lambda d: d.mean,
        "P50": lambda d: d.p50,
        "P90": lambda d: d.p90,
        "P99": lambda d: d.p99,
    }
    return [
        _Column(
            label=f"{name} {label} (ms)", value=_part_of(pick, part), digits=1, better=-1, scale=_MS
        )
        for label, part in parts.items()
    ]


_COLUMNS = (
    _Column(label="requests", value=lambda f: f.requests_count, digits=0),
    _Column(label="errors", value=lambda f: f.errors_count, digits=0, better=-1),
    *_times("TTFT", lambda f: f.ttft_s),
    *_times("TPOT", lambda f: f.tpot_s),
    _Column(
        label="ITL P99 (ms)",
        value=_part_of(lambda f: f.itl_s, lambda d: d.p99),
        digits=1,
        better=-1,
        scale=_MS,
    ),
    _Column(
        label="E2E mean (s)",
        value=_part_of(lambda f: f.e2e_s, lambda d: d.mean),
        digits=2,
        better=-1,
    ),
    _Column(label="goodput (requests/s)", value=lambda f: f.goodput, digits=2, better=1),
    _Column(label="met the SLO (%)", value=lambda f: f.slo_ratio, digits=1, better=1, scale=100),
    _Column(
        label="hit ratio, actual (%)",
        value=lambda f: f.hit_ratio_actual,
        digits=1,
        better=1,
        scale=100,
    ),
    _Column(
        label="hit ratio, predicted (%)", value=lambda f: f.hit_ratio_predicted, digits=1, scale=100
    ),
    _Column(
        label="predicted exactly (%)",
        value=lambda f: f.predicted_exactly_ratio,
        digits=1,
        scale=100,
    ),
    _Column(
        label="in-flight imbalance, max/mean (x)",
        value=lambda f: f.in_flight_imbalance,
        digits=2,
        better=-1,
    ),
    _Column(label="output tokens/s", value=lambda f: f.output_tokens_rate, digits=0),
    _Column(label="offered rate (requests/s)", value=lambda f: f.offered_rate, digits=2),
    _Column(label="sent rate (requests/s)", value=lambda f: f.sent_rate, digits=2),
    _Column(
        label="schedule lag P99 (ms)",
        value=_part_of(lambda f: f.schedule_lag_s, lambda d: d.p99),
        digits=1,
        scale=_MS,
    ),
)


def table_rows(runs: Sequence[Run], slo: Slo | None = None) -> list[TableRow]:
    """The table's rows; rows nobody has a figure for are left out."""
    all_figures = [figures(run.records, slo) for run in runs]
    rows = [_row(column, all_figures) for column in _COLUMNS]
    if not all(one.kept_up for one in all_figures):
        cells = tuple("yes" if one.kept_up else "NO, too slow" for one in all_figures)
        rows.append(TableRow(label="generator kept up (yes/no)", cells=cells))
    labels = dict.fromkeys(label for run in runs for label in run.extra_figures)
    for label in labels:
        values = [run.extra_figures.get(label) for run in runs]
        rows.append(TableRow(label=label, cells=tuple(map(_extra_cell, values))))
    return [row for row in rows if set(row.cells) != {NOT_KNOWN}]


def console_table(title: str, runs: Sequence[Run], slo: Slo | None = None) -> Table:
    """A rich table: one column per run, the best figure of a row in bold."""
    table = Table(title=escape(title), title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(escape(run.name), justify="right")
    for row in table_rows(runs, slo):
        cells = [
            f"[bold green]{escape(cell)}[/]" if index == row.best else escape(cell)
            for index, cell in enumerate(row.cells)
        ]
        table.add_row(escape(row.label), *cells)
    return table


def figures_json(runs: Sequence[Run], slo: Slo | None = None) -> str:
    """`{"slo": ..., "runs": {name: {figures, "notes", "extra_figures"}}}`; seconds everywhere."""
    slo = slo or Slo()
    per_run = {
        run.name: {
            **asdict(figures(run.records, slo)),
            "notes": dict(run.notes),
            "extra_figures": dict(run.extra_figures),
        }
        for run in runs
    }
    return json.dumps({"slo": asdict(slo), "runs": per_run}, indent=2) + "\n"


def _row(column: _Column, all_figures: Sequence[Figures]) -> TableRow:
    values = [column.value(one) for one in all_figures]
    cells = tuple(
        NOT_KNOWN if value is None else f"{value * column.scale:,.{column.digits}f}"
        for value in values
    )
    known = [column.better * value for value in values if value is not None]
    if column.better == 0 or len(set(cells)) == 1 or not known:
        return TableRow(label=column.label, cells=cells)
    best = [value is not None and column.better * value == max(known) for value in values]
    return TableRow(label=column.label, cells=cells, best=best.index(True))


def _extra_cell(value: float | str | None) -> str:
    if value is None:
        return NOT_KNOWN
    return value if isinstance(value, str) else f"{value:,.4g}"
