"""`python -m loadgen simulate` and `capacity`: a scenario's runs, from file to report."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.errors import LoadgenError
from loadgen.outputs import check_output
from loadgen.simulation.lab import results
from loadgen.simulation.lab.capacity import Bounds, Found
from loadgen.simulation.lab.cells import Cell
from loadgen.simulation.lab.matrix import Kept, Workers, capacity_cell, cells, digest
from loadgen.simulation.lab.policy_names import policy_of
from loadgen.simulation.lab.scenario import (
    Scenario,
    ScenarioError,
    Traces,
    WorkloadSpec,
    load_scenario,
)
from workers.simulated.cost_model import ProfileError, load_profile
from workers.simulated.eviction.policies import EVICTIONS

_STEADY_RATIO = 10
"""Arrivals of a run over the bound on TTFT; above, a capacity is too high by a tenth at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a scenario is run; None: as the file says.

    Attributes:
        traces: the folder of traces.
    """

    scenario: str
    traces: str | None = None
    policies: Sequence[str] | None = None
    workloads: Sequence[str] | None = None
    loads: Sequence[float] | None = None
    seeds: Sequence[int] | None = None
    evictions: Sequence[str] | None = None

    def chosen(self) -> Scenario:
        """The scenario so narrowed. Raises ScenarioError naming what there is not."""
        scenario = load_scenario(self.scenario)
        workloads = {workload.name: workload for workload in scenario.workloads}
        missing = [name for name in self.workloads or () if name not in workloads]
        if missing:
            raise ScenarioError(
                f"workloads: scenario {self.scenario} has no {missing[0]}; it has "
                f"{', '.join(workloads)}"
            )
        wanted = {
            "policies": self.policies or scenario.policies,
            "workloads": [workloads[name] for name in self.workloads or workloads],
            "loads": self.loads or scenario.loads,
            "seeds": self.seeds or scenario.seeds,
            "evictions": self.evictions or scenario.evictions,
        }
        twice = [what for what, of in wanted.items() if any(of.count(one) > 1 for one in of)]
        if twice:
            raise ScenarioError(f"{twice[0]}: one is named twice")
        chosen = scenario.model_copy(update={what: tuple(of) for what, of in wanted.items()})
        for name in chosen.evictions:
            if name not in EVICTIONS:
                raise ScenarioError(f"evictions: no `{name}`; there are {', '.join(EVICTIONS)}")
        for name in (*chosen.policies, chosen.capacity_policy):
            try:
                policy_of(name)
            except ValueError as error:
                raise ScenarioError(f"policies: {error}") from error
        for fleet in chosen.fleets:
            try:
                load_profile(fleet.profile)
            except ProfileError as error:
                raise ScenarioError(f"fleets: {error}") from error
        return chosen


def simulate(
    selection: Selection,
    folder: Path,
    console: Console,
    *,
    processes: int | None = None,
    fresh: bool = False,
) -> None:
    """Run what is missing, print the tables, write `summary.json`, `tables.md` and `report.html`.

    Finished runs and found capacities are kept in `runs.jsonl`: after an abort the rest is run, and
    nothing twice.

    Args:
        selection: what is run.
        folder: of these files.
        console: for progress and tables.
        processes: None: as many as there are cores.
        fresh: forget what was run before.

    Raises:
        LoadgenError: the scenario or a workload is impossible, or a file cannot be written.
    """
    scenario, traces = selection.chosen(), Traces.of(selection.traces)
    for name in ("summary.json", "tables.md", "report.html", "runs.jsonl"):
        check_output("output", folder / name)
    kept = Kept(folder / "runs.jsonl")
    if fresh:
        kept.path.unlink(missing_ok=True)
    _say_traces(scenario, traces, console)
    with Workers(processes or os.cpu_count() or 1) as workers:
        capacities = _capacities(scenario, traces, workers, kept, console)
        wanted = cells(scenario, traces, capacities)
        found = kept.runs()
        missing = [cell for cell in wanted if digest(cell) not in found]
        if len(missing) < len(wanted):
            console.print(f"{len(wanted) - len(missing)} of {len(wanted)} runs are there already")
        with _progress(console, len(missing)) as advance:
            for cell, seen in workers.run(missing):
                kept.add(cell, seen)
                found[digest(cell)] = seen
                advance(cell)
    runs = [replace(found[digest(cell)], **asdict(cell.key)) for cell in wanted]
    results.show(scenario, runs, console)
    results.write(folder, scenario, traces, capacities, runs)
    console.print(f"report: {folder / 'report.html'}\nfigures: {folder / 'summary.json'}")


def capacity(
    selection: Selection,
    bounds: Bounds,
    console: Console,
    *,
    processes: int | None = None,
) -> dict[str, Found]:
    """Find and print the capacity of every workload for every policy of the selection.

    Returns:
        by "workload, policy".

    Raises:
        LoadgenError: the scenario or a workload is impossible.
    """
    scenario, traces = selection.chosen(), Traces.of(selection.traces)
    _say_traces(scenario, traces, console)
    wanted = {
        f"{workload.name}, {policy}": capacity_cell(scenario, traces, workload, policy)
        for workload in scenario.workloads
        for policy in selection.policies or (scenario.capacity_policy,)
    }
    found: dict[str, Found] = {}
    with (
        Workers(processes or os.cpu_count() or 1) as workers,
        _progress(console, len(wanted)) as advance,
    ):
        for name, one in workers.capacities(wanted, bounds):
            found[name] = one
            advance(wanted[name])
    for name, one in sorted(found.items()):
        _say_short(wanted[name].workload, one, bounds, console)
    table = Table(title=f"Capacity of {scenario.fleets[0].instances} instances")
    for heading in ("workload", "policy", "requests/s", "TTFT P99", "TPOT mean", "hit ratio"):
        table.add_column(heading, justify="left" if heading in ("workload", "policy") else "right")
    for name, one in sorted(found.items()):
        workload, policy = name.split(", ")
        table.add_row(workload, policy, *_figures(one))
    console.print(table)
    return found


def _figures(found: Found) -> tuple[str, ...]:
    at = found.at_rate
    if at is None:
        return ("none", "", "", "")
    return (
        f"{found.rate:.4g}",
        f"{at.ttft_p99_s:.3g} s",
        f"{1000 * at.tpot_mean_s:.3g} ms",
        f"{at.hit_ratio:.1%}",
    )


def _capacities(
    scenario: Scenario, traces: Traces, workers: Workers, kept: Kept, console: Console
) -> dict[str, float]:
    """Requests per second by workload: stated, found before, or found now."""
    capacities = {
        workload.name: stated
        for workload in scenario.workloads
        if (stated := traces.capacity_rps(workload)) is not None
    }
    unknown = {
        workload.name: capacity_cell(scenario, traces, workload, scenario.capacity_policy)
        for workload in scenario.workloads
        if workload.name not in capacities
    }
    found_before = kept.capacities()
    for name, cell in list(unknown.items()):
        if (rate := found_before.get(digest(cell))) is not None:
            capacities[name] = rate
            del unknown[name]
    if unknown:
        console.print(f"finding the capacity of {', '.join(unknown)} first")
    for name, found in workers.capacities(unknown, Bounds()):
        if not found.rate:
            raise LoadgenError(
                f"workload {name}: no rate keeps P99 TTFT within 10 s and mean TPOT within "
                "100 ms; shorten its prompts, or state capacity_rps"
            )
        console.print(f"capacity of {name}: {found.rate:.4g} requests/s")
        _say_short(unknown[name].workload, found, Bounds(), console)
        kept.add_capacity(unknown[name], found.rate)
        capacities[name] = found.rate
    return capacities


def _say_short(workload: WorkloadSpec, found: Found, bounds: Bounds, console: Console) -> None:
    """A queue grows while requests arrive: where they soon end, it never becomes too long."""
    if not found.rate or bounds.ttft_p99_s is None:
        return
    arrive_s = workload.requests_count(found.rate) / found.rate
    if arrive_s < _STEADY_RATIO * bounds.ttft_p99_s:
        console.print(
            f"{workload.name}: at {found.rate:.4g} requests/s all arrive within {arrive_s:.0f} s, "
            f"too soon to tell a fleet that falls behind by P99 TTFT within {bounds.ttft_p99_s:g} "
            "s: this capacity is too high, a longer duration_s or larger requests_max finds a "
            "lower one",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )


def _say_traces(scenario: Scenario, traces: Traces, console: Console) -> None:
    for workload in scenario.workloads:
        if workload.trace and traces.paths(workload) is None:
            console.print(
                f"{workload.name}: {', '.join(workload.trace)} is not in {traces.folder}; the "
                f"generated workload {workload.generate} stands in for it (--traces, "
                "docs/traces.md)",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Cell], None]]:
    """A bar, or where there is no terminal a line every tenth."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    done = 0
    with bar:
        task = bar.add_task("runs", total=total)

        def advance(cell: Cell) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=f"{cell.workload.name} {cell.load:.0%}")
            if not console.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                console.print(f"{done} of {total} runs", highlight=False)

        yield advance
