"""What comes of a scenario's runs: tables at the console, and the files of the results."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from loadgen.simulation.lab import claims_whys
from loadgen.simulation.lab.figures import AGENT_SLO, RunFigures
from loadgen.simulation.lab.report.cells import Matrix
from loadgen.simulation.lab.report.claims import judge
from loadgen.simulation.lab.report.console import console_claims, console_comparison
from loadgen.simulation.lab.report.evictions import eviction_rows, eviction_tables
from loadgen.simulation.lab.report.markdown import markdown_tables
from loadgen.simulation.lab.report.page import write_page
from loadgen.simulation.lab.report.summary import write_summary
from loadgen.simulation.lab.scenario import Scenario, Traces, WorkloadSpec


def show(scenario: Scenario, runs: Sequence[RunFigures], console: Console) -> None:
    """Print a table for each workload, load and fleet, and the papers' claims."""
    matrix = Matrix.of(runs)
    for shape in matrix.shapes:
        for workload in matrix.workloads:
            for load in matrix.loads(workload):
                found = matrix.at(workload, load, shape)
                if found:
                    console.print(console_comparison(workload, load, found))
    console.print(
        console_claims(judge(matrix, agents=_agents(scenario.workloads), whys=claims_whys.WHYS))
    )


def write(
    folder: Path,
    scenario: Scenario,
    traces: Traces,
    capacities: Mapping[str, float],
    runs: Sequence[RunFigures],
) -> None:
    """Write `summary.json`, `tables.md` and `report.html`."""
    write_summary(folder / "summary.json", runs)
    matrix, agents = Matrix.of(runs), _agents(scenario.workloads)
    judged = judge(matrix, agents=agents, whys=claims_whys.WHYS)
    tables = markdown_tables(matrix, judged)
    if len(scenario.evictions) > 1:
        tables = f"{eviction_tables(eviction_rows(runs))}\n{tables}"
    (folder / "tables.md").write_text(tables, encoding="utf-8")
    notes = {
        f"capacity of {workload.name}": f"{capacities[workload.name]:.4g} requests/s; "
        + (
            f"trace {', '.join(workload.trace)}"
            if traces.paths(workload)
            else f"generated, {workload.generate}"
        )
        for workload in scenario.workloads
    }
    write_page(
        folder / "report.html",
        "Policies in virtual time",
        runs,
        notes,
        agents=agents,
        whys=claims_whys.WHYS,
    )


def _agents(workloads: Sequence[WorkloadSpec]) -> Collection[str]:
    return {one.name for one in workloads if one.tpot_slo_s <= AGENT_SLO.tpot_s}
