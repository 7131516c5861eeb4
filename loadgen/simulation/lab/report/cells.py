"""Runs that differ in nothing but their seed, together. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, nan
from statistics import fmean, stdev

from loadgen.simulation.lab.figures import RunFigures, RunKey

BASELINE = "lmetric"
"""The policy every other is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """Of a fleet: number of instances and routers, and how late a router sees the others' work."""

    instances: int
    routers: int
    staleness_s: float

    @property
    def label(self) -> str:
        """In words."""
        return f"{self.instances} instances, {self.routers_label}"

    @property
    def routers_label(self) -> str:
        """Without the instances, where all fleets have as many."""
        routers = "1 router" if self.routers == 1 else f"{self.routers} routers"
        if not self.staleness_s:
            return routers
        late_s = self.staleness_s
        return f"{routers}, {f'{1000 * late_s:g} ms' if late_s < 1 else f'{late_s:g} s'} stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One policy under one load of one workload on one fleet, over all seeds.

    Args:
        runs: one per seed, at least one.
    """

    workload: str
    load: float
    policy: str
    variant: str
    shape: Shape
    runs: tuple[RunFigures, ...]

    @property
    def series(self) -> str:
        """Its name among the lines of a plot and the rows of a table."""
        return f"{self.policy} ({self.variant})" if self.variant else self.policy

    def values(self, figure: str) -> list[float]:
        """A figure of every seed that has it."""
        found = [float(getattr(run, figure)) for run in self.runs]
        return [value for value in found if isfinite(value)]

    def mean(self, figure: str) -> float:
        """Over seeds; NaN when no seed has it."""
        values = self.values(figure)
        return fmean(values) if values else nan

    def spread(self, figure: str) -> float:
        """Standard deviation over seeds, relative to the mean; NaN of fewer than two seeds."""
        values = self.values(figure)
        if len(values) < 2 or not fmean(values):  # noqa: PLR2004  # two seeds make a spread
            return nan
        return stdev(values) / abs(fmean(values))

    def quantiles(self, figure: str) -> list[float]:
        """Percentiles 0 to 100, each the mean of the seeds'; empty when no seed has any."""
        columns = [getattr(run, figure) for run in self.runs if getattr(run, figure)]
        return [fmean(column) for column in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All cells of a lab's runs, in the order in which they first appeared."""

    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, runs: Iterable[RunFigures]) -> "Matrix":
        """Of runs in any order; of two with the same key the later one counts."""
        latest: dict[RunKey, RunFigures] = {run.key: run for run in runs}
        groups: dict[tuple[str, float, str, str, Shape], list[RunFigures]] = {}
        for key, run in latest.items():
            shape = Shape(instances=key.instances, routers=key.routers, staleness_s=key.staleness_s)
            place = (key.workload, key.load, key.policy, key.variant, shape)
            groups.setdefault(place, []).append(run)
        return cls(
            cells=tuple(
                Cell(
                    workload=workload,
                    load=load,
                    policy=policy,
                    variant=variant,
                    shape=shape,
                    runs=tuple(sorted(group, key=lambda run: run.seed)),
                )
                for (workload, load, policy, variant, shape), group in groups.items()
            )
        )

    @property
    def workloads(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(cell.workload for cell in self.cells))

    @property
    def series(self) -> list[str]:
        """Policies in order of appearance, the baseline first, plain ones before variants."""
        found = {cell.series: cell for cell in self.cells}
        return sorted(
            found, key=lambda name: (bool(found[name].variant), found[name].policy != BASELINE)
        )

    @property
    def main_shape(self) -> Shape:
        """The fleet most cells are of; of equals the one with fewest routers and no staleness."""
        counts: dict[Shape, int] = {}
        for cell in self.cells:
            counts[cell.shape] = counts.get(cell.shape, 0) + 1
        return min(counts, key=lambda shape: (-counts[shape], shape))

    @property
    def shapes(self) -> list[Shape]:
        """Ascending."""
        return sorted({cell.shape for cell in self.cells})

    def loads(self, workload: str) -> list[float]:
        """Of a workload on any fleet, ascending."""
        return sorted({cell.load for cell in self.cells if cell.workload == workload})

    def at(self, workload: str, load: float, shape: Shape) -> list[Cell]:
        """Cells side by side, in the order of `series`."""
        rank = {name: place for place, name in enumerate(self.series)}
        found = [
            cell
            for cell in self.cells
            if cell.workload == workload and isclose(cell.load, load) and cell.shape == shape
        ]
        return sorted(found, key=lambda cell: rank[cell.series])


def baseline_of(cell: Cell, others: Sequence[Cell]) -> Cell | None:
    """The baseline in the same variant, else the plain one; None when it was not run.

    A variant of the baseline itself is compared with the plain one: that tells what it brings.
    """
    variants = ("",) if cell.policy == BASELINE else (cell.variant, "")
    for variant in variants:
        for other in others:
            if other.policy == BASELINE and other.variant == variant:
                return other
    return None


def difference(cell: Cell, other: Cell | None, figure: str) -> float:
    """Relative difference of a figure's mean, over 0 when the cell's is larger; NaN if unknown."""
    if other is None or not other.mean(figure):
        return nan
    return cell.mean(figure) / other.mean(figure) - 1
