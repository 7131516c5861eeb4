"""`python -m loadgen consistency`: how alike several routers decide, in virtual time."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadgen.simulation import joining, processes, verdicts
from loadgen.simulation.cells import WARM_UP_S, Cell, measure, play
from loadgen.simulation.records import Figures
from loadgen.simulation.verdicts import Comparison

CAPACITY_REQUEST_RATE = 360.0
"""What 16 engines take, in requests per second; `--capacity` measures it anew."""

LOADS = (0.5, 0.8)
JOIN_SECONDS = 60.0
QUICK_JOIN_SECONDS = 20.0
TTFT_P99_MAX_S, TPOT_MEAN_MAX_S = 10.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run.

    Attributes:
        bound_ratio: a difference within it holds. Quick runs have so few requests and seeds that
            P99 rests on a handful of requests and moves by a quarter between seeds.
    """

    routers: tuple[int, ...] = (1, 2, 4, 8)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    requests_count: int = 3200
    bound_ratio: float = verdicts.BOUND_RATIO
    join_window_s: float = JOIN_SECONDS
    capacity: float = CAPACITY_REQUEST_RATE
    processes: int = 2

    def cells(self) -> list[Cell]:
        """The matrix."""
        return [
            Cell(
                load=load,
                request_rate=load * self.capacity,
                routers_count=routers,
                shares_reservations=shares,
                seed=seed,
                requests_count=self.requests_count,
            )
            for seed in self.seeds
            for load in LOADS
            for routers in self.routers
            for shares in (True, False)
        ]

    def joining_cells(self) -> list[Cell]:
        """A cold instance joins after the warm-up, at every load; one router."""
        return [
            Cell(
                load=load,
                request_rate=load * self.capacity,
                routers_count=1,
                shares_reservations=True,
                seed=self.seeds[0],
                requests_count=round(load * self.capacity * self.join_window_s),
                join_s=WARM_UP_S,
            )
            for load in LOADS
        ]


QUICK = Plan(
    routers=(1, 8),
    seeds=(1,),
    requests_count=250,
    bound_ratio=0.25,
    join_window_s=QUICK_JOIN_SECONDS,
)


def find_capacity(*, low: float, high: float, steps: int, requests_count: int) -> float:
    """The highest rate, by bisection, at which one router keeps P99 TTFT and mean TPOT in bounds.

    Bounds: P99 TTFT 10 s, mean TPOT 100 ms (those of the policy comparisons).
    """
    for _ in range(steps):
        rate = (low + high) / 2
        seen = measure(
            Cell(
                load=1.0,
                request_rate=rate,
                routers_count=1,
                shares_reservations=True,
                seed=1,
                requests_count=requests_count,
            )
        )
        if seen.ttft_p99_s <= TTFT_P99_MAX_S and seen.tpot_mean_s <= TPOT_MEAN_MAX_S:
            low = rate
        else:
            high = rate
    return low


def run(plan: Plan, output: Path, console: Console) -> bool:
    """Run everything, print the tables, write the summary; whether every verdict holds."""
    cells, joins = plan.cells(), plan.joining_cells()
    measured: dict[Cell, Figures] = {}
    joined: dict[Cell, joining.Joining] = {}
    with (
        _progress(console, len(cells) + len(joins)) as advance,
        processes.pool(plan.processes) as pool,
    ):
        joins_running = {cell: pool.submit(_join, cell) for cell in joins}
        cells_running = {cell: pool.submit(measure, cell) for cell in cells}
        for cell, joining_done in joins_running.items():
            joined[cell] = joining_done.result()
            advance()
        for cell, cell_done in cells_running.items():
            measured[cell] = cell_done.result()
            advance()
    comparisons = verdicts.compare(measured, plan.bound_ratio)
    _print_table(comparisons, console)
    for cell, found in sorted(joined.items(), key=lambda pair: pair[0].load):
        console.print(_joining_table(cell, found))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_summary(plan, measured, comparisons, joined), encoding="utf-8")
    console.print(f"figures: {output}", markup=False)
    alike = all(c.holds for c in comparisons if c.shares_reservations)
    return alike and not any(j.is_magnet or j.is_leper for j in joined.values())


def _join(cell: Cell) -> joining.Joining:
    assert cell.join_s is not None
    return joining.judge(play(cell), join_s=cell.join_s, end_s=cell.end_s)


def _print_table(comparisons: list[Comparison], console: Console) -> None:
    """One table a load and figure, narrow enough for any terminal; ! marks a failed verdict."""
    routers = sorted({c.routers_count for c in comparisons})
    for load in sorted({c.load for c in comparisons}):
        table = Table(title=f"Several routers beside one, load {load:.0%}: mean (difference)")
        for heading in ("figure", "reservations", "spread", *(f"{n} routers" for n in routers)):
            table.add_column(heading)
        for figure in verdicts.FIGURES:
            for shares in (True, False):
                row = sorted(
                    (
                        c
                        for c in comparisons
                        if (c.load, c.figure, c.shares_reservations) == (load, figure, shares)
                    ),
                    key=lambda c: c.routers_count,
                )
                mode = "with" if shares else "without"
                table.add_row(
                    figure, mode, f"{row[0].spread_ratio:.1%}", *(_compared(c) for c in row)
                )
        console.print(table)


def _compared(c: Comparison) -> str:
    return f"{c.mean:.4g} ({c.difference_ratio:+.1%}){'' if c.holds else ' !'}"


def _joining_table(cell: Cell, found: joining.Joining) -> Table:
    verdict = "magnet" if found.is_magnet else "leper" if found.is_leper else "neither"
    table = Table(
        title=f"A cold instance joins, load {cell.load:.0%}: magnet or leper: {verdict}; "
        f"half a fair share within {found.half_share_after_s:.0f} s"
    )
    names = list(asdict(found.windows[0])) if found.windows else []
    for name in names:
        table.add_column(name)
    for window in found.windows:
        table.add_row(*(f"{value:.3g}" for value in asdict(window).values()))
    return table


def _summary(
    plan: Plan,
    measured: Mapping[Cell, Figures],
    comparisons: list[Comparison],
    joined: Mapping[Cell, joining.Joining],
) -> str:
    return json.dumps(
        {
            "plan": asdict(plan),
            "cells": [{**asdict(cell), **asdict(seen)} for cell, seen in measured.items()],
            "comparisons": [asdict(c) for c in comparisons],
            "joining": [
                {**asdict(cell), **asdict(found), "half_share_after_s": _finite(found)}
                for cell, found in joined.items()
            ],
        },
        indent=1,
    )


def _finite(found: joining.Joining) -> float | None:
    """JSON has no infinity."""
    after_s = found.half_share_after_s
    return after_s if after_s != float("inf") else None


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("cells", total=total)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done)
            if not console.is_terminal:
                console.print(f"{done}/{total} cells", highlight=False)

        yield advance


def make_plan(
    *, quick: bool, requests_count: int | None, seeds_count: int | None, capacity: float | None
) -> Plan:
    """The plan that the options ask for."""
    plan = QUICK if quick else Plan()
    if requests_count is not None:
        plan = replace(plan, requests_count=requests_count)
    if seeds_count is not None:
        plan = replace(plan, seeds=tuple(range(1, seeds_count + 1)))
    if capacity is not None:
        plan = replace(plan, capacity=capacity)
    return plan
