"""Writes the report a person reads: one HTML file with plots, that works without a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from loadgen.metrics import Slo
from loadgen.records import Run
from loadgen.report import table_rows

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def write_report(
    path: Path | str,
    title: str,
    runs: Sequence[Run],
    notes: Mapping[str, str],
    *,
    slo: Slo | None = None,
) -> None:
    """Write the report of one or more runs of the same workload.

    Args:
        path: the HTML file; directories are made as needed.
        title: heading.
        runs: shown in this order and, over all plots, in these colours.
        notes: what was run, label -> text: workload, rate, fleet, seed, machine.
        slo: bounds of goodput; `Slo()` unless given.
    """
    # Imported here: plotly takes longer to load than everything else, and only reports need it.
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    from loadgen import plots  # noqa: PLC0415

    slo = slo or Slo()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    html = template.render(
        title=title,
        notes=notes,
        runs=[
            {"name": run.name, "colour": plots.run_colour(index), "notes": run.notes}
            for index, run in enumerate(runs)
        ],
        rows=table_rows(runs, slo),
        slo=slo,
        plotly_js=get_plotlyjs(),
        sections=[
            {
                "heading": plot.heading,
                "explanation": plot.explanation,
                "div": plot.figure.to_html(
                    full_html=False,
                    include_plotlyjs=False,
                    div_id=f"plot-{number}",
                    config={"displaylogo": False, "responsive": True},
                ),
            }
            for number, plot in enumerate(plots.all_plots(runs))
        ],
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
