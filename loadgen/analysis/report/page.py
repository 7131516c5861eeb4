"""Pure but for its templates: the page a person reads, with all it needs in one HTML file."""

import json
from collections.abc import Mapping
from pathlib import Path

import jinja2

from loadgen.analysis.figures import TraceFigures
from loadgen.analysis.report import charts
from loadgen.analysis.report.tables import CATEGORY_HEADS, OVERVIEW, category_cells

_FOLDER = Path(__file__).parent
_LAB_FOLDER = Path(__file__).parents[2] / "simulation" / "lab" / "report"
"""Both pages look alike: this one uses the lab's style sheet."""


def page(title: str, found: Mapping[str, TraceFigures], notes: Mapping[str, str]) -> str:
    """The text of the page of all traces.

    Args:
        title: heading.
        found: by trace, at least one.
        notes: what was analysed, label -> text.
    """
    # Imported here: plotly takes longer to load than everything else, and only pages need it.
    from plotly.offline import get_plotlyjs  # noqa: PLC0415

    assert found, "no trace, no page"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader((_FOLDER, _LAB_FOLDER)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    overview = charts.overview_charts(found)
    traces = [
        {
            "name": name,
            "id": f"t{place}",
            "rows": [category_cells(category) for category in one.categories],
            "chart": charts.category_chart(f"t{place}-gaps", one),
        }
        for place, (name, one) in enumerate(found.items())
    ]
    every = [*overview, *(trace["chart"] for trace in traces)]
    plots = {
        chart.identity: {"layout": chart.layout, "lines": chart.lines, "byTrace": chart.by_trace}
        for chart in every
        if isinstance(chart, charts.Chart)
    }
    return environment.get_template("analysis.html.jinja").render(
        title=title,
        notes=notes,
        found=found,
        columns=OVERVIEW,
        overview=overview,
        traces=traces,
        heads=CATEGORY_HEADS,
        plots=_script_json(plots),
        plotly_js=get_plotlyjs(),
        colours=charts.COLOURS,
    )


def _script_json(value: object) -> str:
    """JSON that no text in it can end the script element of."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
