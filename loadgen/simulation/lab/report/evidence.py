"""What runs say to a paper's claim: one relative difference per workload that can tell. Pure."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import hypot, isclose, isfinite

from loadgen.simulation.lab.report.cells import BASELINE, Cell, Matrix, difference

HALF_LOAD = 0.5
SATURATION = 1.0
NOISE_RATIO = 0.03

SMETRIC = "smetric"
HIT_WEIGHTED = ("max_hit", "linear_90", "linear_70")
BALANCING = ("least_loaded", "round_robin", "power_of_two", "vllm_v1")
TIER, DETECTOR, DISAGGREGATED = "tier", "detector", "disaggregated"

Evidence = Callable[[Matrix, Collection[str]], Iterator["Shown"]]
"""From the runs and the names of the agents' workloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one workload shows.

    Args:
        ratio: relative difference of the claimed figure to the rival's.
        noise: below it a difference says nothing.
        rival: what was compared with.
    """

    workload: str
    load: float
    ratio: float
    noise: float
    rival: str


def against(figure: str, *rivals: str, prefix: str | None = None) -> Evidence:
    """The baseline over the rival with the lowest mean TTFT, at half of the capacity.

    Args:
        figure: what is compared.
        rivals: policies by name.
        prefix: policies by the beginning of their name.
    """

    def is_rival(cell: Cell) -> bool:
        by_prefix = prefix is not None and cell.policy.startswith(prefix)
        return by_prefix or cell.policy in rivals

    def evidence(matrix: Matrix, _agents: Collection[str]) -> Iterator[Shown]:
        for cells in _places(matrix):
            if isclose(cells[0].load, HALF_LOAD):
                rival = _best(filter(is_rival, cells), "ttft_mean_s", -1)
                yield from _shown(_named(cells, BASELINE), rival, figure)

    return evidence


def others_past_saturation(matrix: Matrix, _agents: Collection[str]) -> Iterator[Shown]:
    """The lowest mean TTFT of another policy over the baseline's, above capacity."""
    for cells in _places(matrix):
        if cells[0].load > SATURATION:
            others = [cell for cell in cells if cell.policy != BASELINE]
            best = _best(others, "ttft_mean_s", -1)
            yield from _shown(best, _named(cells, BASELINE), "ttft_mean_s")


def with_detector(matrix: Matrix, _agents: Collection[str]) -> Iterator[Shown]:
    """The baseline's mean TTFT with the detector over that without it."""
    for cells in _places(matrix, DETECTOR):
        plain = matrix.at(cells[0].workload, cells[0].load, cells[0].shape)
        without = _named([cell for cell in plain if not cell.variant], BASELINE)
        yield from _shown(_named(cells, BASELINE), without, "ttft_mean_s")


def smetric_peak(figure: str, variant: str) -> Evidence:
    """SMetric's highest figure at any load over the best other policy's; agents only."""

    def evidence(matrix: Matrix, agents: Collection[str]) -> Iterator[Shown]:
        for cells in _all_loads(matrix, agents, variant):
            ours = [cell for cell in cells if cell.policy == SMETRIC]
            others = [cell for cell in cells if cell.policy != SMETRIC]
            yield from _shown(_best(ours, figure, 1), _best(others, figure, 1), figure)

    return evidence


def balancing_peak(matrix: Matrix, agents: Collection[str]) -> Iterator[Shown]:
    """The highest throughput within the SLO without regard to hits, over the best; with a tier."""
    figure = "goodput_tokens_per_s"
    for cells in _all_loads(matrix, agents, TIER):
        balancing = [cell for cell in cells if cell.policy in BALANCING]
        yield from _shown(_best(balancing, figure, 1), _best(cells, figure, 1), figure)


def smetric_gain_grows(matrix: Matrix, agents: Collection[str]) -> Iterator[Shown]:
    """SMetric's gain at the highest load, above capacity, less that at the lowest; with a tier."""
    figure = "goodput_tokens_per_s"
    for cells in _all_loads(matrix, agents, TIER):
        loads = sorted({cell.load for cell in cells})
        gains: list[Shown] = []
        for load in (loads[0], loads[-1]):
            here = [cell for cell in cells if cell.load == load]
            others = [cell for cell in here if cell.policy != SMETRIC]
            gains += _shown(_named(here, SMETRIC), _best(others, figure, 1), figure)
        if len(gains) < 2 or loads[-1] <= SATURATION:  # noqa: PLR2004  # both ends
            continue
        low, high = gains
        yield Shown(
            workload=high.workload,
            load=high.load,
            ratio=high.ratio - low.ratio,
            noise=max(low.noise, high.noise),
            rival=high.rival,
        )


def reuse_without_tier(matrix: Matrix, agents: Collection[str]) -> Iterator[Shown]:
    """The baseline's hit ratio over the best of the policies that weigh hits; agents only."""
    for cells in _places(matrix):
        if cells[0].workload in agents:
            weighted = [cell for cell in cells if cell.policy in HIT_WEIGHTED]
            best = _best(weighted, "hit_ratio", 1)
            yield from _shown(_named(cells, BASELINE), best, "hit_ratio")


def _places(matrix: Matrix, variant: str = "") -> Iterator[list[Cell]]:
    """Cells side by side on the main fleet, of one variant."""
    for workload in matrix.workloads:
        for load in matrix.loads(workload):
            cells = matrix.at(workload, load, matrix.main_shape)
            alike = [cell for cell in cells if cell.variant == variant]
            if alike:
                yield alike


def _all_loads(matrix: Matrix, agents: Collection[str], variant: str) -> Iterator[list[Cell]]:
    """The agents' cells of a variant, per workload."""
    groups: dict[str, list[Cell]] = {}
    for cells in _places(matrix, variant):
        if cells[0].workload in agents:
            groups.setdefault(cells[0].workload, []).extend(cells)
    yield from groups.values()


def _named(cells: Sequence[Cell], policy: str) -> Cell | None:
    return next((cell for cell in cells if cell.policy == policy), None)


def _best(cells: Iterator[Cell] | Sequence[Cell], figure: str, better: int) -> Cell | None:
    """With the highest figure (`better` +1) or the lowest (-1), among those that have it."""
    known = [cell for cell in cells if isfinite(cell.mean(figure))]
    return max(known, key=lambda cell: better * cell.mean(figure), default=None)


def _shown(ours: Cell | None, rival: Cell | None, figure: str) -> Iterator[Shown]:
    """Nothing where one is missing or was not measured."""
    if ours is None or rival is None or not isfinite(difference(ours, rival, figure)):
        return
    spreads = [cell.spread(figure) for cell in (ours, rival)]
    yield Shown(
        workload=ours.workload,
        load=ours.load,
        ratio=difference(ours, rival, figure),
        noise=max(NOISE_RATIO, hypot(*filter(isfinite, spreads))),
        rival=rival.series,
    )
