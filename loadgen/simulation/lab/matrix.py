"""Runs all cells of a scenario on several processes, and keeps what has been run."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Final, Self, TypeVar

from pydantic import TypeAdapter

from loadgen.errors import LoadgenError
from loadgen.simulation import processes
from loadgen.simulation.lab.capacity import Bounds, Found, find_capacity
from loadgen.simulation.lab.cells import Cell, measure
from loadgen.simulation.lab.figures import RunFigures
from loadgen.simulation.lab.scenario import Scenario, Traces, WorkloadSpec

T = TypeVar("T")

_CODE = ("loadgen", "router", "workers", "indexer")
"""Packages whose source and engines' profiles decide about results ..."""

_TOLD_ONLY = (
    "simulation/lab/report/",
    "simulation/lab/claims_whys.py",
    "simulation/lab/results.py",
    "scenarios/",
)
"""... but for what only shows them, or says what is run: that is told apart by cell."""


def cells(scenario: Scenario, traces: Traces, capacities: Mapping[str, float]) -> list[Cell]:
    """All cells; those of one workload, rate and seed one after the other.

    Args:
        scenario: what is wanted.
        traces: where traces are.
        capacities: requests per second by workload.
    """
    return [
        Cell(
            workload=workload,
            traces=traces,
            fleet=fleet,
            policy=policy,
            load=load,
            rate=load * capacities[workload.name] * fleet.instances / scenario.fleets[0].instances,
            seed=seed,
            eviction=eviction,
        )
        for workload, load, seed in product(scenario.workloads, scenario.loads, scenario.seeds)
        for fleet, eviction, policy in product(
            scenario.fleets, scenario.evictions, scenario.policies
        )
    ]


def capacity_cell(scenario: Scenario, traces: Traces, workload: WorkloadSpec, policy: str) -> Cell:
    """What a workload's capacity for a policy is measured with."""
    return Cell(
        workload=workload,
        traces=traces,
        fleet=scenario.fleets[0],
        policy=policy,
        load=1.0,
        rate=1.0,
        seed=scenario.seeds[0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptRun:
    cell: str
    figures: RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptCapacity:
    cell: str
    capacity_rps: float


_KEPT: Final[TypeAdapter[_KeptRun | _KeptCapacity]] = TypeAdapter(_KeptRun | _KeptCapacity)


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of finished runs and found capacities.

    A JSON object a line: the digest of the cell, and its figures, or what its capacity is.
    """

    path: Path

    def runs(self) -> dict[str, RunFigures]:
        """Those that are there, by the digest of the cell."""
        return {kept.cell: kept.figures for kept in self._lines() if isinstance(kept, _KeptRun)}

    def capacities(self) -> dict[str, float]:
        """Those that are there, in requests per second, by the digest of `capacity_cell`."""
        lines = self._lines()
        return {kept.cell: kept.capacity_rps for kept in lines if isinstance(kept, _KeptCapacity)}

    def add(self, cell: Cell, seen: RunFigures) -> None:
        """Append a run."""
        self._append(_KeptRun(cell=digest(cell), figures=seen))

    def add_capacity(self, cell: Cell, capacity_rps: float) -> None:
        """Append the capacity found with a cell."""
        self._append(_KeptCapacity(cell=digest(cell), capacity_rps=capacity_rps))

    def _lines(self) -> Iterator[_KeptRun | _KeptCapacity]:
        """Without a line that an abort has cut short, or that another version has written."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                kept = _KEPT.validate_python(json.loads(line))
            except ValueError:  # which a ValidationError is
                continue
            yield kept

    def _append(self, kept: _KeptRun | _KeptCapacity) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(kept))
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # an abort has cut the last line short
                    line = "\n" + line
            file.write(line.encode() + b"\n")


def digest(cell: Cell) -> str:
    """Of all that decides about a cell's result: what it is, and the source that runs it."""
    told = json.dumps(
        {
            "workload": cell.workload.model_dump(
                mode="json", exclude={"capacity_rps", "trace_capacity_rps"}
            ),
            "trace": [_file(path) for path in cell.traces.paths(cell.workload) or ()],
            "fleet": cell.fleet.model_dump(mode="json"),
            "policy": cell.policy,
            "eviction": cell.eviction,
            "rate": cell.rate,
            "seed": cell.seed,
            "code": _code_digest(),
        },
        sort_keys=True,
    )
    return hashlib.blake2b(told.encode(), digest_size=12).hexdigest()


def _file(path: Path) -> tuple[str, int, int]:
    """A trace as it is now: another one of the same name is another workload."""
    seen = path.stat()
    return str(path), seen.st_size, seen.st_mtime_ns


@cache
def _code_digest() -> str:
    hashed = hashlib.blake2b(digest_size=12)
    for package in _CODE:
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*.*")):
            name = path.relative_to(root).as_posix()
            if path.suffix in {".py", ".toml"} and not name.startswith(_TOLD_ONLY):
                hashed.update(name.encode())
                hashed.update(path.read_bytes())
    return hashed.hexdigest()


class Workers:
    """Processes that run cells; within `with`."""

    def __init__(self, count: int) -> None:
        self._pool = processes.pool(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, wanted: Sequence[Cell]) -> Iterator[tuple[Cell, RunFigures]]:
        """The cells and their figures, as they come.

        Raises:
            LoadgenError: a workload cannot be made, or a process has died.
        """
        running = {self._pool.submit(measure, cell): cell for cell in wanted}
        for done in as_completed(running):
            yield running[done], _result(done)

    def capacities(self, wanted: Mapping[str, Cell], bounds: Bounds) -> Iterator[tuple[str, Found]]:
        """What each is called and its capacity, as they come. Raises LoadgenError."""
        running = {
            self._pool.submit(find_capacity, cell, bounds): name for name, cell in wanted.items()
        }
        for done in as_completed(running):
            yield running[done], _result(done)


def _result(done: Future[T]) -> T:
    try:
        return done.result()
    except BrokenProcessPool as error:
        raise LoadgenError(
            "a process of the simulation has died, most likely for want of memory: give fewer "
            "--processes"
        ) from error
