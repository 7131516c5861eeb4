"""The tables at a console. Pure."""

from collections.abc import Mapping

from rich import box
from rich.markup import escape
from rich.table import Table

from loadgen.analysis.figures import TraceFigures
from loadgen.analysis.report.tables import CATEGORY_HEADS, OVERVIEW, category_cells

_CATEGORIES_SHOWN = 10  # the page has them all
NO_BREAK = "\N{NO-BREAK SPACE}"
_LEFT_OUT = ("blocks", "fit: mean gap")  # a terminal is not wider; the page has them


def console_overview(found: Mapping[str, TraceFigures]) -> Table:
    """Figures as rows, traces as columns: there are more figures than a terminal is wide."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("figure")
    for name in found:
        table.add_column(escape(name), justify="right")
    for column in OVERVIEW:
        table.add_row(column.label, *(column.text(one) for one in found.values()))
    return table


def console_categories(name: str, one: TraceFigures) -> Table:
    """Reuse by type and turn, the largest categories first."""
    table = Table(
        title=escape(f"{name}: reuse by the type and turn that touched the block last"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown = [place for place, head in enumerate(CATEGORY_HEADS) if head not in _LEFT_OUT]
    for place in shown:
        table.add_column(
            CATEGORY_HEADS[place], justify="right" if place else "left", no_wrap=not place
        )
    for category in one.categories[:_CATEGORIES_SHOWN]:
        cells = category_cells(category)
        # Headings may wrap, so that a narrow terminal cuts none of them; figures stay in a line.
        table.add_row(*(escape(cells[place].replace(" ", NO_BREAK)) for place in shown))
    return table
