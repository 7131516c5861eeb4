"""One cell of the consistency study: a load, a number of routers, a seed. Pure."""

from dataclasses import dataclass

from loadgen.simulation.fleet import FleetSpec, VirtualFleet
from loadgen.simulation.records import Figures, FleetRun, figures
from loadgen.simulation.workload import WorkloadSpec, draw_sessions
from router.policies import POLICIES

WARM_UP_S = 8.0
"""Requests that arrive before are not counted; a session lasts about this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run.

    Attributes:
        request_rate: offered, per second.
        requests_count: expected after the warm-up.
        join_s: when the last instance joins, cold; None: it is there from the beginning.
    """

    load: float
    request_rate: float
    routers_count: int
    shares_reservations: bool
    seed: int
    requests_count: int
    join_s: float | None = None
    policy: str = "lmetric"

    @property
    def end_s(self) -> float:
        """The window ends."""
        return WARM_UP_S + self.requests_count / self.request_rate


def play(cell: Cell) -> FleetRun:
    """Run a cell. Its workload depends on rate, length and seed alone."""
    per_session = WorkloadSpec(session_rate=1, duration_s=1).requests_per_session
    workload = WorkloadSpec(session_rate=cell.request_rate / per_session, duration_s=cell.end_s)
    spec = FleetSpec(
        routers_count=cell.routers_count,
        shares_reservations=cell.shares_reservations,
        end_s=cell.end_s,
        join_s=cell.join_s,
    )
    fleet = VirtualFleet(spec, POLICIES[cell.policy], cell.seed)
    return fleet.play(draw_sessions(workload, cell.seed))


def measure(cell: Cell) -> Figures:
    """Its figures after the warm-up."""
    return figures(play(cell), from_s=WARM_UP_S, to_s=cell.end_s)
