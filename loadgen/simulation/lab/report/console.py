"""The tables at a console. Pure."""

from collections.abc import Sequence
from math import isfinite

from rich import box
from rich.markup import escape
from rich.table import Table

from loadgen.report import NOT_KNOWN
from loadgen.simulation.lab.report.cells import BASELINE, Cell, Matrix, Shape
from loadgen.simulation.lab.report.claims import Judged, Verdict
from loadgen.simulation.lab.report.tables import (
    COLUMNS,
    Column,
    Entry,
    comparison,
    overview,
    percent,
    rates,
    signed_percent,
    telling,
)

_LEFT_OUT = ("tpot_p50_s", "tpot_p95_s", "requests", "slo_ratio", "ttft_drift")
"""A table of more columns fits no terminal; the page has them."""

_COLUMNS = tuple(column for column in COLUMNS if column.figure not in _LEFT_OUT)

_TIMES_FROM = 9  # +900 % is ten times as much, and from here on percents are hard to read
_SECONDS_FROM_S = 10.0
_WHOLE_FROM_S = 100.0

_VERDICT_STYLES = {
    Verdict.REPRODUCED: "green",
    Verdict.PARTLY: "yellow",
    Verdict.NOT: "red",
    Verdict.NOT_RUN: "dim",
}


def console_comparison(workload: str, load: float, cells: Sequence[Cell]) -> Table:
    """One workload and load: policies as rows, the best of each column bold."""
    seeds = max(len(cell.runs) for cell in cells)
    table = Table(
        title=escape(
            f"{workload}, load {percent(load)} ({rates(cells)}), {cells[0].shape.label}, "
            f"{'1 seed' if seeds == 1 else f'mean of {seeds} seeds'}; times in ms, % "
            f"against {BASELINE}"
        ),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    columns = telling(cells, _COLUMNS)
    for column in columns:
        table.add_column(column.short, justify="right")
    variant = ""
    for row in comparison(cells, columns):
        if row.variant != variant:
            table.add_section()
            variant = row.variant
        table.add_row(
            escape(row.series),
            *(
                _console_cell(entry, column)
                for entry, column in zip(row.entries, columns, strict=True)
            ),
        )
    return table


def console_overview(matrix: Matrix, shape: Shape, column: Column) -> Table:
    """Differences to the baseline in percent: workloads and loads as rows, policies as columns."""
    found = overview(matrix, shape, column)
    table = Table(
        title=escape(f"{column.label}: % against {BASELINE}; {shape.label}"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("workload, load", no_wrap=True)
    for row in found.rows:
        table.add_column(escape(row.series), justify="right", overflow="fold")
    names = [f"{workload} {percent(load)}" for workload, load in found.places]
    for place, name in enumerate([*names, "geometric mean"]):
        if place == len(names):
            table.add_section()
        entries = [row.entries[place] for row in found.rows]
        cells = [f"{100 * e.value:+z.0f}" if isfinite(e.value) else NOT_KNOWN for e in entries]
        table.add_row(escape(name), *map(_coloured, cells, entries))
    return table


def console_claims(judged: Sequence[Judged]) -> Table:
    """The papers' claims beside ours; those that no run can tell are left out."""
    table = Table(title="The papers' claims", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("claim", "theirs", "ours", "shown by", "verdict"):
        table.add_column(heading, justify="right" if heading in ("theirs", "ours") else "left")
    for one in judged:
        if one.ours is None:
            continue
        whole = one.grades.count(Verdict.REPRODUCED)
        table.add_row(
            escape(f"{one.claim.paper}: {one.claim.text}"),
            escape(one.claim.theirs),
            signed_percent(one.ours),
            f"{whole} of {len(one.grades)}",
            f"[{_VERDICT_STYLES[one.verdict]}]{one.verdict.value}[/]",
        )
    return table


def _console_cell(entry: Entry, column: Column) -> str:
    text = escape(_short(entry, column))
    text = f"[bold green]{text}[/]" if entry.best else text
    if not (column.compared and isfinite(entry.ratio)):
        return text
    ratio = f"{100 * entry.ratio:+z.0f}%"
    if entry.ratio >= _TIMES_FROM:
        ratio = f"x{1 + entry.ratio:.0f}"
    return f"{text} {_coloured(ratio, entry)}"


def _short(entry: Entry, column: Column) -> str:
    """Times past saturation in seconds, and they say so: that keeps the column narrow."""
    if not column.figure.endswith("_s") or not entry.value >= _SECONDS_FROM_S:
        return entry.text
    return f"{entry.value:,.0f}s" if entry.value >= _WHOLE_FROM_S else f"{entry.value:.1f}s"


def _coloured(text: str, entry: Entry) -> str:
    match entry.good:
        case 1:
            return f"[green]{escape(text)}[/]"
        case -1:
            return f"[red]{escape(text)}[/]"
        case _:
            return f"[dim]{escape(text)}[/]"
