"""The tables as Markdown, to be kept beside code. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from loadgen.simulation.lab.report.cells import BASELINE, Cell, Matrix
from loadgen.simulation.lab.report.claims import Judged
from loadgen.simulation.lab.report.tables import (
    comparison,
    percent,
    rates,
    signed_percent,
    telling,
)


def markdown_tables(matrix: Matrix, judged: Sequence[Judged]) -> str:
    """The claims that some run can tell, then a table for each workload, load and fleet.

    Args:
        matrix: the runs.
        judged: of `claims.judge`.
    """
    parts = [*_claims([one for one in judged if one.ours is not None])]
    for shape in matrix.shapes:
        for workload in matrix.workloads:
            for load in matrix.loads(workload):
                cells = matrix.at(workload, load, shape)
                if cells:
                    parts.append(
                        f"### {workload}, load {percent(load)} ({rates(cells)}), "
                        f"{shape.label}\n\n{_comparison(cells)}"
                    )
    return "\n\n".join(parts) + "\n"


def _claims(judged: Sequence[Judged]) -> Iterator[str]:
    if judged:
        yield "### The papers' claims"
        yield _table(
            ("claim", "theirs", "ours", "verdict", "why"),
            (
                (
                    f"{one.claim.paper}: {one.claim.text}",
                    one.claim.theirs,
                    signed_percent(one.ours or 0.0),
                    one.verdict.value,
                    one.why,
                )
                for one in judged
            ),
        )


def _comparison(cells: Sequence[Cell]) -> str:
    """Policies as rows, the best of each column bold, the difference where the console has it."""
    columns = telling(cells)
    return _table(
        (f"against {BASELINE}", *(column.label for column in columns)),
        (
            (
                row.series,
                *(
                    (f"**{entry.text}**" if entry.best else entry.text)
                    + (f" ({entry.difference})" if column.compared and entry.difference else "")
                    for entry, column in zip(row.entries, columns, strict=True)
                ),
            )
            for row in comparison(cells, columns)
        ),
    )


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
