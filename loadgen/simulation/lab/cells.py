"""One cell of a scenario: a workload at a rate, a fleet, a policy, a seed. Deterministic."""

import time
from dataclasses import dataclass, replace
from functools import lru_cache

from loadgen.metrics import Slo
from loadgen.simulation.instances import BLOCK_SIZE_TOKENS
from loadgen.simulation.lab.demand import Demand, demanded
from loadgen.simulation.lab.figures import RunFigures, RunKey, Window, figures
from loadgen.simulation.lab.fleet import LabFleet
from loadgen.simulation.lab.policy_names import policy_of
from loadgen.simulation.lab.scenario import Fleet, ScenarioError, Traces, WorkloadSpec
from loadgen.simulation.lab.spec import Handovers, LabSpec
from loadgen.simulation.lab.workloads import at_rate, base_rows
from loadgen.trace_row import TraceRow
from workers.simulated.eviction.policies import LRU
from workers.simulated.tier import TierConfig

_DEMANDS_KEPT = 2
"""Cells of one workload and rate come one after the other; a demand may be hundreds of MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is run.

    Attributes:
        policy: of routing.
        eviction: of each instance's cache.
        load: the rate over the workload's capacity.
        rate: requests per second.
    """

    workload: WorkloadSpec
    traces: Traces
    fleet: Fleet
    policy: str
    load: float
    rate: float
    seed: int
    eviction: str = LRU

    @property
    def key(self) -> RunKey:
        """Its name in the results."""
        return RunKey(
            workload=self.workload.name,
            load=self.load,
            policy=self.policy,
            instances=self.fleet.instances,
            routers=self.fleet.routers,
            staleness_s=self.fleet.staleness_s,
            seed=self.seed,
            variant=" ".join(filter(None, (self.fleet.told_variant, self._other_eviction))),
            eviction=self.eviction,
        )

    @property
    def _other_eviction(self) -> str:
        return "" if self.eviction == LRU else self.eviction


def measure(cell: Cell) -> RunFigures:
    """Run a cell.

    Raises:
        LoadgenError: the workload cannot be made.
    """
    demand = _demand(_Wanted(cell.workload, cell.traces, cell.seed), cell.rate)
    began_s = time.process_time()
    fleet = cell.fleet
    spec = LabSpec(
        instances=fleet.instances,
        prefill_instances=fleet.prefill_instances,
        handovers=Handovers(
            tokens_per_s=fleet.transfer_tokens_per_s, latency_s=fleet.transfer_latency_s
        ),
        routers=fleet.routers,
        staleness_s=fleet.staleness_s,
        detects_hot_prefixes=fleet.detects_hot_prefixes,
        report_interval_s=fleet.report_interval_s,
        profile=fleet.profile,
        max_num_seqs=fleet.max_num_seqs,
        max_num_batched_tokens=fleet.max_num_batched_tokens,
        capacity_blocks=fleet.capacity_blocks,
        eviction=cell.eviction,
        tier=None if fleet.tier is None else TierConfig(**fleet.tier.model_dump()),
    )
    lab_fleet = LabFleet(spec, policy_of(cell.policy), demand, seed=cell.seed)
    run = lab_fleet.play()
    starts_s = demand.root_arrivals_s
    from_s = starts_s[int(cell.workload.warm_up_ratio * (len(starts_s) - 1))]
    seen = figures(
        cell.key,
        run.requests,
        run.busy,
        Window(from_s=from_s, to_s=starts_s[-1] + 1e-9),
        slo=Slo(tpot_s=cell.workload.tpot_slo_s),
        offered_rps=cell.rate,
        cpu_s=time.process_time() - began_s,
        virtual_s=run.virtual_s,
    )
    return replace(seen, capacity_blocks=lab_fleet.engines[0].config.capacity_blocks)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows of a workload, as a key: specs with tables in them have no hash of their own."""

    workload: WorkloadSpec
    traces: Traces
    seed: int

    def __hash__(self) -> int:
        return hash((self.workload.name, self.traces.folder, self.seed))


@lru_cache(maxsize=_DEMANDS_KEPT)
def _rows(wanted: _Wanted) -> tuple[TraceRow, ...]:
    workload = wanted.workload
    count = workload.requests_max
    return base_rows(workload, wanted.traces, requests_count=count, seed=wanted.seed)


@lru_cache(maxsize=_DEMANDS_KEPT)
def _demand(wanted: _Wanted, rate: float) -> Demand:
    workload = wanted.workload
    rows = at_rate(_rows(wanted)[: workload.requests_count(rate)], workload, rate)
    try:
        return demanded(rows, pace=workload.pace, block_size_tokens=BLOCK_SIZE_TOKENS)
    except ValueError as error:
        raise ScenarioError(f"workload {workload.name}: {error}") from error
