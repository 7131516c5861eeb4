"""`make demo`: the same requests once per policy against one fleet, side by side.

One local fleet serves all policies; a request names its policy in a header. Before each policy
every engine's KV$ is emptied, so each starts cold. At the end every prediction of the routers is
audited against what the engines did, and every counter has to be zero.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from jsonargparse import auto_cli
from rich.console import Console

from deploy import demo_report, signals, summary
from deploy.audit import Audit, Journal, audit
from deploy.config import FleetConfig
from deploy.demo_config import DemoConfig
from deploy.errors import FleetError
from deploy.policy_run import PolicyRun, run_policies
from deploy.workload import Workload, choose, describe
from indexer.contract import block_hash

CPU_BUSY_SHARE_MAX = 0.75
"""Above it latencies measure this machine's processors, not the policies."""


def fleet_of(config: DemoConfig) -> FleetConfig:
    """The fleet before the workload has decided speed-up and cache size."""
    return FleetConfig(
        workers=config.workers,
        routers=config.routers,
        profile=config.profile,
        run_dir=config.out_dir / "fleet",
        journal=True,
    )


def quick(config: DemoConfig) -> DemoConfig:
    """The same in a few seconds: everything happens, and the figures say little."""
    return replace(
        config,
        policies=config.policies[:1],
        requests=min(config.requests, 30),
        rows=min(config.rows, 500),
        output_length_factor=0.1,
        run_s=3.0,
        workers=2,
    )


def audit_run(run: PolicyRun, journal: Journal, config: FleetConfig, workload: Workload) -> Audit:
    """Compare every prediction of a run with what the engines did."""
    prompts = workload.prompts()
    size = config.block_size_tokens
    root = block_hash.root(model_scope=config.model_name, block_size_tokens=size)
    requests = [summary.served(record, prompts[record.row_index]) for record in run.records]
    judged = [request for request in requests if request is not None]
    return audit(judged, journal, root=root, block_size_tokens=size)


def read_journal(config: FleetConfig) -> Journal:
    """What all sidecars of a fleet that has ended have published."""
    paths = sorted(config.run_dir.glob("journal-*.jsonl"))
    return Journal.parse(line for path in paths for line in path.read_text().splitlines())


def evaluate(
    runs: Sequence[PolicyRun], config: FleetConfig, workload: Workload
) -> list[demo_report.Measured]:
    """Figures of every run."""
    journal = read_journal(config)
    measured = []
    for run in runs:
        audited = audit_run(run, journal, config, workload)
        records = [summary.in_simulated_time(record, workload.speedup) for record in run.records]
        figures = summary.result(
            records,
            audit=audited,
            busy_s=run.busy_s,
            router_added_s=list(run.router_added_s.values()),
        )
        measured.append(
            demo_report.Measured(run=run, records=records, audit=audited, figures=figures)
        )
    return measured


async def demo(config: DemoConfig, console: Console) -> int:
    """Run it all; 0 when every policy's run was sound.

    Raises:
        FleetError: the trace cannot be used, a part failed, or counters are not zero.
    """
    fleet = fleet_of(config)
    workload = choose(config, fleet)
    fleet = replace(fleet, speedup=workload.speedup, capacity_blocks=workload.capacity_blocks)
    facts = describe(workload, config, fleet)
    demo_report.print_facts(console, facts)
    runs = await run_policies(config.policies, fleet, workload, console)
    measured = evaluate(runs, fleet, workload)
    demo_report.print_table(console, measured)
    paths = demo_report.write(config.out_dir, measured, facts, fleet, workload)
    console.print(f"\nreport   {paths.report}\nfigures  {paths.summary}", highlight=False)
    busy = max((run.cpu_busy_share or 0.0 for run in runs), default=0.0)
    if busy > CPU_BUSY_SHARE_MAX:
        console.print(
            f"warning: processors were {busy:.0%} busy, so latencies are partly theirs; "
            "raise run_s or lower requests or output_length_factor (make demo DEMO_ARGS=...)"
        )
    failed = summary.failures({each.run.policy: each.figures for each in measured})
    for failure in failed:
        console.print(f"failed: {failure}", style="bold red", highlight=False)
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Run the demo; exit code 1 when something failed, 128 + signal when interrupted."""
    config = auto_cli(
        DemoConfig,
        args=argv,
        prog="python -m deploy.demo",
        default_env=True,
        env_prefix="TIMESTABLE_DEMO",
        as_positional=False,
    )
    console = Console()
    try:
        return signals.run(lambda: demo(quick(config) if config.quick else config, console))
    except FleetError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
