"""Writes the page a person reads: one HTML file with everything in it, that needs no network."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from loadgen.simulation.lab.figures import AGENT_SLO, CHAT_SLO, RunFigures
from loadgen.simulation.lab.report import charts, claims
from loadgen.simulation.lab.report.cells import BASELINE, Cell, Matrix, Shape
from loadgen.simulation.lab.report.eviction_views import EvictionView, eviction_views
from loadgen.simulation.lab.report.evictions import eviction_rows
from loadgen.simulation.lab.report.tables import (
    COLUMNS,
    OVERVIEW_FIGURES,
    Column,
    by_shape,
    comparison,
    overview,
    percent,
    rates,
    signed_percent,
    telling,
)

_FOLDER = Path(__file__).parent
_SHOWN_AT_FIRST = charts.COLOURS  # lines; all others are a click away


def write_page(
    path: Path,
    title: str,
    runs: Sequence[RunFigures],
    notes: Mapping[str, str],
    *,
    agents: Collection[str] = (),
    whys: Mapping[str, str] | None = None,
) -> None:
    """Write the page of all runs.

    Args:
        path: the HTML file; directories are made as needed.
        title: heading.
        runs: at least one.
        notes: what was run, label -> text, above all else.
        agents: names of the agents' workloads, whose SLO is stricter.
        whys: why a claim fared as it did, by its identity in `claims.CLAIMS`.
    """
    html = page(title, runs, notes, agents=agents, whys=whys)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")


def page(
    title: str,
    runs: Sequence[RunFigures],
    notes: Mapping[str, str],
    *,
    agents: Collection[str] = (),
    whys: Mapping[str, str] | None = None,
) -> str:
    """The page's text; arguments as of `write_page`."""
    # Imported here: plotly takes longer to load than everything else, and only pages need it.
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    assert runs, "no runs, no page"
    matrix = Matrix.of(runs)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(_FOLDER),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    workloads = [
        _workload(matrix, workload, f"w{place}") for place, workload in enumerate(matrix.workloads)
    ]
    evictions = _evictions(runs)
    plotted = [chart for part in (evictions, workloads) for one in part for chart in _charts(one)]
    return environment.get_template("page.html.jinja").render(
        title=title,
        notes={**notes, **_counted(matrix, runs)},
        baseline=BASELINE,
        series=[
            {"name": name, "shown": place < _SHOWN_AT_FIRST}
            for place, name in enumerate(matrix.series)
        ],
        loads=[
            (charts.load_key(load), percent(load))
            for load in sorted({load for name in matrix.workloads for load in matrix.loads(name)})
        ],
        overviews=[overview(matrix, matrix.main_shape, one) for one in _overview_columns()],
        percent=percent,
        signed_percent=signed_percent,
        groups=lambda places: [(k, list(g)) for k, g in groupby(places, key=lambda p: p[0])],
        judged=claims.judge(matrix, agents=agents, whys=whys),
        rule=claims.RULE,
        workloads=workloads,
        evictions=evictions,
        fleets=_fleets(matrix),
        chat_slo=CHAT_SLO,
        agent_slo=AGENT_SLO,
        agents=[name for name in matrix.workloads if name in agents],
        plotly_js=get_plotlyjs(),
        plots=_script_json({chart.identity: _plot(chart) for chart in plotted}),
        colours=charts.COLOURS,
    )


def _evictions(runs: Sequence[RunFigures]) -> list[EvictionView]:
    """Where eviction policies are an axis."""
    return eviction_views(eviction_rows(runs)) if len({run.eviction for run in runs}) > 1 else []


def _charts(part: EvictionView | Mapping[str, Any]) -> Sequence[charts.Chart]:
    if isinstance(part, EvictionView):
        return part.charts
    found: list[charts.Chart] = part["charts"]
    return found


def _overview_columns() -> list[Column]:
    return [column for column in COLUMNS if column.figure in OVERVIEW_FIGURES]


def _workload(matrix: Matrix, workload: str, identity: str) -> dict[str, Any]:
    """Of the fleet it was run on most: the matrix's main one where it is among them."""
    shapes = [cell.shape for cell in matrix.cells if cell.workload == workload]
    shape = matrix.main_shape if matrix.main_shape in shapes else shapes[0]
    places = [(load, matrix.at(workload, load, shape)) for load in matrix.loads(workload)]
    return {
        "name": workload,
        "id": identity,
        "shape": shape.label,
        "tables": [
            {
                "load": percent(load),
                "rates": rates(cells),
                "columns": telling(cells),
                "rows": comparison(cells, telling(cells)),
            }
            for load, cells in places
            if cells
        ],
        "charts": list(charts.workload_charts(matrix, workload, shape, identity)),
    }


def _fleets(matrix: Matrix) -> list[dict[str, Any]]:
    """Per figure, workload and load with several fleets: policies as rows, fleets as columns."""
    places = []
    for workload in matrix.workloads:
        for load in matrix.loads(workload):
            groups = {shape: matrix.at(workload, load, shape) for shape in matrix.shapes}
            shapes = [shape for shape, cells in groups.items() if cells]
            if len(shapes) > 1:
                places.append((workload, load, shapes, groups))
    same = len({shape.instances for shape in matrix.shapes}) == 1
    return [
        {
            "column": column,
            "tables": [
                {
                    "workload": workload,
                    "load": percent(load),
                    "shapes": [s.routers_label if same else s.label for s in shapes],
                    "rows": _fleet_rows(matrix.series, shapes, groups, column),
                }
                for workload, load, shapes, groups in places
            ],
        }
        for column in _overview_columns()
        if places
    ]


def _fleet_rows(
    series: Sequence[str],
    shapes: Sequence[Shape],
    groups: Mapping[Shape, Sequence[Cell]],
    column: Column,
) -> list[dict[str, Any]]:
    """Policies that were run on several of the fleets; None where one was not."""
    rows = []
    for name in series:
        found = [
            next((cell for cell in groups[shape] if cell.series == name), None) for shape in shapes
        ]
        cells = [cell for cell in found if cell is not None]
        if len(cells) > 1:
            entries = iter(by_shape(cells, column))
            rows.append(
                {
                    "series": name,
                    "entries": [None if cell is None else next(entries) for cell in found],
                }
            )
    return rows


def _counted(matrix: Matrix, runs: Sequence[RunFigures]) -> dict[str, str]:
    seeds = sorted({run.seed for run in runs})
    return {
        "runs": f"{len(runs):,}, {sum(run.requests for run in runs):,} requests measured",
        "fleets": "; ".join(shape.label for shape in matrix.shapes),
        "seeds": ", ".join(map(str, seeds)),
        "cost": (
            f"{sum(run.cpu_s for run in runs):,.0f} s of processor time for "
            f"{sum(run.virtual_s for run in runs) / 3600:,.1f} hours of virtual time"
        ),
    }


def _plot(chart: charts.Chart) -> dict[str, Any]:
    return {
        "id": chart.identity,
        "layout": chart.layout,
        "traces": chart.traces,
        "bySeries": chart.by_series,
    }


def _script_json(value: object) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
