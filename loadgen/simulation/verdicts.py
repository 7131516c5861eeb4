"""Several routers against one: differences, the spread of seeds, verdicts. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from loadgen.simulation.cells import Cell
from loadgen.simulation.records import Figures

FIGURES = (
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "tpot_p99_s",
    "hit_ratio",
    "imbalance_ratio",
)
BOUND_RATIO = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of several routers beside one router's, at one load.

    Attributes:
        mean: over seeds.
        difference_ratio: of that to one router's mean; above 0 is larger.
        spread_ratio: standard deviation of one router's seeds over its mean.
        holds: the difference is within the bound, or inside the spread.
    """

    load: float
    shares_reservations: bool
    routers_count: int
    figure: str
    mean: float
    difference_ratio: float
    spread_ratio: float
    holds: bool


def compare(measured: Mapping[Cell, Figures], bound_ratio: float = BOUND_RATIO) -> list[Comparison]:
    """Every load, mode, number of routers and figure, against one router of the same mode."""
    groups: dict[tuple[float, bool, int], list[Figures]] = {}
    for cell, seen in sorted(measured.items(), key=lambda pair: pair[0].seed):
        key = (cell.load, cell.shares_reservations, cell.routers_count)
        groups.setdefault(key, []).append(seen)
    found = []
    for (load, shares, routers_count), runs in sorted(groups.items()):
        alone = groups[load, shares, 1]
        for figure in FIGURES:
            one, many = _values(alone, figure), _values(runs, figure)
            spread = float(one.std(ddof=1) / one.mean()) if len(one) > 1 else 0.0
            difference = float(many.mean() / one.mean() - 1)
            found.append(
                Comparison(
                    load=load,
                    shares_reservations=shares,
                    routers_count=routers_count,
                    figure=figure,
                    mean=float(many.mean()),
                    difference_ratio=difference,
                    spread_ratio=spread,
                    holds=abs(difference) <= max(bound_ratio, spread),
                )
            )
    return found


def _values(runs: Sequence[Figures], figure: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([asdict(run)[figure] for run in runs])
