"""Virtual time against real time: the demo's workload through both.

    python tests/benchmarks/agreement_bench.py [--runs 1] [--speedup 0.4] [--quick] [--output FILE]
        [--paces closed_loop timestamps]

real       the demo's path: a client, two routers, an embedded Redis, four simulated engines over
           HTTP with a sidecar each, every part a process of its own; cold engines in every run
virtual    the policy lab's loop over the fast engine: the same requests at the same times, the same
           pace, the same sizes. It is repeated with other tie-breaks and other routers, because
           those alone move the figures
replayed   the fast engine alone, given each real request at the moment it was sent and on the
           instance that a router really chose: what is left is what the real path adds

Both paces are played, one after the other: "closed_loop", where a turn waits for the answer before
it, and "timestamps", where every request is sent at its time.

All times are the engines'. They pass more slowly than ours by default, so that what the real path
adds (router, Redis, HTTP, waiting for a processor: 10 to 50 ms on two busy cores) is little beside
a TTFT of hundreds; a run takes two and a half minutes of each pace. Exit code 1 when mean, P50 or
P95 of TTFT, real against virtual, differ by more than 10 % at either, but for --quick, whose few
requests differ by more than that among themselves. A single run by timestamps may, too: --runs 3.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from deploy.demo import summary
from deploy.demo.config import DemoConfig, fleet_of, quickened
from deploy.demo.policy_run import PolicyRun, run_policies
from deploy.demo.workload import Workload, choose
from deploy.local.config import FleetConfig
from loadgen.conversations import previous_turns
from loadgen.metrics import tpot_s, ttft_s
from loadgen.records import RequestRecord
from loadgen.simulation.chains import chain_requests
from loadgen.simulation.instances import make_engine_config
from loadgen.simulation.lab.demand import Demand
from loadgen.simulation.lab.fleet import LabFleet
from loadgen.simulation.lab.spec import LabSpec
from loadgen.workloads.pacing import Pace, Step
from router.policies import policy_by_name
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.request import ChainRequest

POLICY = "lmetric"
VIRTUAL_RUNS = 20
DIFFERENCE_MAX = 0.10
JUDGED = ("ttft_mean_s", "ttft_p50_s", "ttft_p95_s")
ID_DIGITS = 4
PACES: tuple[Pace, ...] = ("closed_loop", "timestamps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Figures of one run, in the engines' seconds."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_mean_s: float
    hit_ratio: float

    @classmethod
    def of(
        cls, ttfts_s: Sequence[float], tpots_s: Sequence[float], hit_ratio: float
    ) -> "RunSummary":
        """Of the times of all requests."""
        p50, p95 = np.percentile(ttfts_s, [50, 95])
        return cls(
            ttft_mean_s=float(np.mean(ttfts_s)),
            ttft_p50_s=float(p50),
            ttft_p95_s=float(p95),
            tpot_mean_s=float(np.mean(tpots_s)),
            hit_ratio=hit_ratio,
        )


def steps_of(parents: Sequence[int | None], schedule: Sequence[float], pace: Pace) -> list[Step]:
    """When each request is due; as `loadgen.replay` does it for the real fleet."""
    if pace == "timestamps":
        return [Step(parent=None, after_s=due_s) for due_s in schedule]
    return [
        Step(parent=None, after_s=due_s)
        if parent is None
        else Step(parent=parent, after_s=0.0, not_before_s=due_s)
        for parent, due_s in zip(parents, schedule, strict=True)
    ]


def virtual(workload: Workload, config: FleetConfig, seed: int, pace: Pace) -> RunSummary:
    """The lab's loop; a seed is a tie-break and a router for each request."""
    rows = workload.rows
    parents = previous_turns(rows)
    sessions: list[int] = []
    turns: list[int] = []
    for place, parent in enumerate(parents):
        sessions.append(place if parent is None else sessions[parent])
        turns.append(0 if parent is None else turns[parent] + 1)
    # Zeros before the number change a request's tie-breaks and nothing else.
    requests = [
        replace(one, request_id=one.request_id.zfill(ID_DIGITS + seed))
        for one in chain_requests(rows, block_size_tokens=config.block_size_tokens)
    ]
    demand = Demand(
        requests=requests,
        steps=steps_of(parents, workload.schedule, pace),
        nominal_s=list(workload.schedule),
        turns=turns,
        sessions=sessions,
        identities_count=_identities_count(requests),
    )
    spec = LabSpec(
        instances=config.workers,
        routers=config.routers,
        profile=config.profile,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        capacity_blocks=config.capacity_blocks,
    )
    seen = LabFleet(spec, policy_by_name(POLICY), demand, seed=seed).play().requests
    several = seen.output_tokens > 1
    tpots_s = (seen.ended_s - seen.first_token_s)[several] / (seen.output_tokens[several] - 1)
    hit_ratio = float(seen.hit_tokens.sum() / seen.prompt_tokens.sum())
    ttfts_s = seen.first_token_s - seen.arrived_s
    return RunSummary.of(ttfts_s.tolist(), tpots_s.tolist(), hit_ratio)


def real(run: PolicyRun, speedup: float) -> RunSummary:
    """What the clients saw."""
    failed = [record.error for record in run.records if record.error is not None]
    assert not failed, failed[:3]
    records = [summary.in_simulated_time(record, speedup) for record in run.records]
    return RunSummary.of(
        [time_s for one in records if (time_s := ttft_s(one)) is not None],
        [time_s for one in records if (time_s := tpot_s(one)) is not None],
        sum(one.cached_tokens or 0 for one in records) / sum(one.prompt_tokens for one in records),
    )


def replayed(run: PolicyRun, workload: Workload, config: FleetConfig) -> dict[str, float]:
    """Real TTFTs less those of fast engines given the same requests at the same moments."""
    requests = chain_requests(workload.rows, block_size_tokens=config.block_size_tokens)
    by_instance: dict[str, list[RequestRecord]] = {}
    for record in run.records:
        moved = summary.in_simulated_time(record, workload.speedup)
        by_instance.setdefault(str(moved.instance), []).append(moved)
    added_s: list[float] = []
    same_hits = 0
    for records in by_instance.values():
        engine = SpanEngine(
            make_engine_config(
                config.profile,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                capacity_blocks=config.capacity_blocks,
            )
        )
        engine.pool.learn(_identities_count(requests))
        first_s, hits = _play(engine, records, requests)
        for record in records:
            assert record.first_token_s is not None
            added_s.append(record.first_token_s - first_s[record.row_index])
            same_hits += hits[record.row_index] == record.cached_tokens
    p5, p50, p95 = np.percentile(added_s, [5, 50, 95])
    return {
        "added_mean_s": float(np.mean(added_s)),
        "added_p5_s": float(p5),
        "added_p50_s": float(p50),
        "added_p95_s": float(p95),
        "same_hit_tokens_share": same_hits / len(added_s),
    }


def _play(
    engine: SpanEngine, records: Sequence[RequestRecord], requests: Sequence[ChainRequest]
) -> tuple[dict[int, float], dict[int, int]]:
    """First tokens and hit tokens by row, of requests added when they were sent."""
    left = sorted(records, key=lambda record: record.sent_s or 0.0)
    first_s: dict[int, float] = {}
    hits: dict[int, int] = {}
    while left or engine.ends_s is not None:
        now_s = engine.ends_s
        if left and (now_s is None or (left[0].sent_s or 0.0) < now_s):
            sent_s = left[0].sent_s or 0.0
            engine.add(requests[left.pop(0).row_index], sent_s)
            if now_s is not None:
                continue
            now_s = sent_s
        elif now_s is not None:
            for request, first, _ in engine.finish():
                if first:
                    first_s[int(request.request_id)] = now_s
        assert now_s is not None
        span = engine.start(now_s)
        for admission in span.admissions if span else ():
            hits[int(admission.request.request_id)] = admission.hit_tokens
    return first_s, hits


def _identities_count(requests: Sequence[ChainRequest]) -> int:
    return max(int(np.max(one.blocks, initial=-1)) for one in requests) + 1


def compare(
    reals: Sequence[RunSummary], virtuals: Sequence[RunSummary]
) -> dict[str, dict[str, Any]]:
    """By figure: mean and range of either path, and real over virtual - 1."""
    compared = {}
    for name in RunSummary.__dataclass_fields__:
        ours = [getattr(one, name) for one in reals]
        theirs = [getattr(one, name) for one in virtuals]
        compared[name] = {
            "real": float(np.mean(ours)),
            "real_range": [min(ours), max(ours)],
            "virtual": float(np.mean(theirs)),
            "virtual_range": [min(theirs), max(theirs)],
            "difference": float(np.mean(ours) / np.mean(theirs) - 1),
        }
    return compared


async def measure(
    config: DemoConfig, runs: int, speedup: float, paces: Sequence[Pace]
) -> dict[str, Any]:
    """Both paths at each pace; see the top of this file."""
    fleet = fleet_of(config)
    workload = replace(choose(config, fleet), speedup=speedup)
    fleet = replace(fleet, speedup=speedup, capacity_blocks=workload.capacity_blocks)
    at_paces = {pace: await at_pace(workload, fleet, runs, pace) for pace in paces}
    return {
        "workload": workload.facts(),
        "fleet": {
            key: getattr(fleet, key) for key in ("workers", "routers", "profile", "capacity_blocks")
        },
        "policy": POLICY,
        "runs": {"real": runs, "virtual": VIRTUAL_RUNS},
        "paces": at_paces,
        "cores": os.cpu_count(),
        "agrees": all(one["agrees"] for one in at_paces.values()),
    }


async def at_pace(workload: Workload, fleet: FleetConfig, runs: int, pace: Pace) -> dict[str, Any]:
    """Figures of both paths at one pace."""
    virtuals = [virtual(workload, fleet, seed, pace) for seed in range(VIRTUAL_RUNS)]
    console = Console(stderr=True)
    measured = await run_policies(
        [POLICY] * runs, fleet, workload, console, wait_for_previous_turn=pace == "closed_loop"
    )
    compared = compare([real(run, workload.speedup) for run in measured], virtuals)
    added = [added_s for run in measured for added_s in run.router_added_s.values()]
    return {
        "figures": compared,
        "replayed": [replayed(run, workload, fleet) for run in measured],
        "virtual_runs": [asdict(one) for one in virtuals],
        "machine": {
            "busy_ratio": [run.cpu_busy_ratio for run in measured],
            "engine_lag_max_s": [run.lag_max_s for run in measured],
            "router_added_p50_s": float(np.median(added)),
            "router_added_p99_s": float(np.percentile(added, 99)),
        },
        "agrees": all(abs(compared[name]["difference"]) <= DIFFERENCE_MAX for name in JUDGED),
    }


def show(pace: str, figures: dict[str, Any]) -> None:
    """Print what was found at one pace."""
    print(pace)
    for name, row in figures["figures"].items():
        print(
            f"{name:<12} real {row['real']:.4f}  virtual {row['virtual']:.4f}  "
            f"({row['virtual_range'][0]:.4f} to {row['virtual_range'][1]:.4f})  "
            f"{row['difference']:+.1%}"
        )
    for row in figures["replayed"]:
        print("replayed    ", {key: round(value, 4) for key, value in row.items()})
    print("machine     ", figures["machine"])


def main() -> int:
    """Run, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="30 requests: that it works at all")
    parser.add_argument("--runs", type=int, default=1, help="real ones")
    parser.add_argument("--speedup", type=float, default=0.4, help="engine seconds in a real one")
    parser.add_argument("--paces", nargs="+", choices=PACES, default=list(PACES))
    parser.add_argument("--trace", help='as of the demo; "generated" for the generated workload')
    parser.add_argument("--output", type=Path, default=Path("build/bench/agreement.json"))
    args = parser.parse_args()
    config = DemoConfig(trace=args.trace, out_dir=args.output.parent / "agreement")
    config = quickened(config) if args.quick else config
    figures = asyncio.run(measure(config, args.runs, args.speedup, args.paces))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1) + "\n")
    for pace, found in figures["paces"].items():
        show(pace, found)
    return 0 if figures["agrees"] or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
