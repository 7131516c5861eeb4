"""`python -m deploy.demo` or `make demo`: one workload, once per policy, side by side.

One local fleet serves all policies; a request names its policy in a header. Before each policy
every engine's KV$ is emptied, so each starts cold. At the end every prediction of the routers is
audited against what the engines did, and every counter has to be zero.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from deploy import command_line
from deploy.demo import report, summary
from deploy.demo.audit import Audit, Journal, audit
from deploy.demo.config import DemoConfig, fleet_of, quickened
from deploy.demo.errors import DemoError, WorkloadError
from deploy.demo.policy_run import PolicyRun, run_policies
from deploy.demo.workload import Workload, choose, describe
from deploy.local import signals
from deploy.local.config import FleetConfig
from deploy.local.errors import FleetError
from deploy.local.layout import journal_path
from indexer.contract import block_hash

CPU_BUSY_RATIO_MAX = 0.75
"""Above it latencies measure this machine's processors, not the policies."""


def audit_run(
    run: PolicyRun, journal: Journal, config: FleetConfig, prompts: Sequence[Sequence[int]]
) -> Audit:
    """Compare every prediction of a run with what the engines did."""
    size = config.block_size_tokens
    root = block_hash.root(model_scope=config.model_name, block_size_tokens=size)
    requests = [summary.served(record, prompts[record.row_index]) for record in run.records]
    judged = [request for request in requests if request is not None]
    return audit(judged, journal, root=root, block_size_tokens=size)


def read_journal(config: FleetConfig) -> Journal:
    """What all sidecars of a fleet that has ended have published."""
    paths = [journal_path(config, number) for number in range(1, config.workers + 1)]
    return Journal.parse(line for path in paths for line in path.read_text().splitlines())


def evaluate(
    runs: Sequence[PolicyRun], config: FleetConfig, workload: Workload
) -> list[report.Measured]:
    """Figures of every run."""
    journal = read_journal(config)
    prompts = workload.prompts()
    measured = []
    for run in runs:
        audited = audit_run(run, journal, config, prompts)
        records = [summary.in_simulated_time(record, workload.speedup) for record in run.records]
        figures = summary.result(
            records,
            audit=audited,
            busy_s=run.busy_s,
            router_added_s=list(run.router_added_s.values()),
        )
        measured.append(report.Measured(run=run, records=records, audit=audited, figures=figures))
    return measured


async def demo(config: DemoConfig, console: Console) -> int:
    """Run it all; 0 when every policy's run was sound.

    Raises:
        WorkloadError: the trace cannot be used.
        DemoError: engines cannot be made cold, or counters are not zero.
        FleetError: a part failed.
    """
    fleet = fleet_of(config)
    workload = choose(config, fleet)
    fleet = replace(fleet, speedup=workload.speedup, capacity_blocks=workload.capacity_blocks)
    facts = describe(workload, config, fleet)
    report.print_facts(console, facts)
    runs = await run_policies(config.policies, fleet, workload, console)
    measured = evaluate(runs, fleet, workload)
    report.print_table(console, measured)
    paths = report.write(config.out_dir, measured, facts, fleet, workload)
    console.print(f"\nreport   {paths.report}\nfigures  {paths.summary}", highlight=False)
    busy = max((run.cpu_busy_ratio or 0.0 for run in runs), default=0.0)
    if busy > CPU_BUSY_RATIO_MAX:
        console.print(
            f"warning: processors were {busy:.0%} busy, so latencies are partly theirs; "
            "raise run_s or lower requests or output_length_factor (make demo DEMO_ARGS=...)"
        )
    failed = summary.failures({each.run.policy: each.figures for each in measured})
    for failure in failed:
        console.print(f"failed: {failure}", style="bold red", highlight=False)
    return 1 if failed else 0


def main(args: Sequence[str] | None = None) -> int:
    """Run the demo.

    Exit code 1 when something failed, 2 for a bad option or trace, 128 + signal when interrupted.
    """
    config = command_line.parse(
        DemoConfig,
        prog="python -m deploy.demo",
        env_prefix="TIMESTABLE_DEMO",
        args=sys.argv[1:] if args is None else args,
    )
    console = Console()
    try:
        return signals.run(lambda: demo(quickened(config) if config.quick else config, console))
    except (DemoError, FleetError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return command_line.EXIT_USAGE if isinstance(failure, WorkloadError) else 1


if __name__ == "__main__":
    sys.exit(main())
