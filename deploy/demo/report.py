"""What the demo leaves: the table, report.html and summary.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.demo.audit import Audit
from deploy.demo.policy_run import PolicyRun
from deploy.demo.summary import PolicyResult, as_json
from deploy.demo.workload import Workload
from deploy.local.config import FleetConfig
from loadgen.html import write_report
from loadgen.records import RequestRecord, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One policy's run and what it says.

    Attributes:
        run: as seen.
        records: its requests in simulated time.
        audit: its predictions.
        figures: its row of the table.
    """

    run: PolicyRun
    records: Sequence[RequestRecord]
    audit: Audit
    figures: PolicyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Files written."""

    report: Path
    summary: Path


def print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    """Print subjects and sentences in two columns."""
    grid = Table.grid(padding=(0, 2))
    for subject, sentence in facts:
        grid.add_row(subject, sentence)
    console.print(grid, highlight=False)


def print_table(console: Console, measured: Sequence[Measured]) -> None:
    """Print the policies as columns, so that it fits a narrow terminal."""
    table = Table(title="TTFT and TPOT in the engines' time, what the router adds in ours")
    table.add_column("")
    for each in measured:
        table.add_column(each.run.policy, justify="right")
    rows = [_cells(each.figures) for each in measured]
    for name in rows[0] if rows else ():
        table.add_row(name, *(row[name] for row in rows))
    console.print(table)


def _cells(figures: PolicyResult) -> dict[str, str]:
    return {
        "TTFT mean (s)": f"{figures.ttft_mean_s:.3f}",
        "TTFT P50 (s)": f"{figures.ttft_p50_s:.3f}",
        "TTFT P99 (s)": f"{figures.ttft_p99_s:.3f}",
        "TPOT mean (ms)": f"{figures.tpot_mean_s * 1000:.1f}",
        "TPOT P50 (ms)": f"{figures.tpot_p50_s * 1000:.1f}",
        "TPOT P99 (ms)": f"{figures.tpot_p99_s * 1000:.1f}",
        "hit ratio, actual (%)": f"{figures.hit_ratio_actual * 100:.1f}",
        "hit ratio, predicted (%)": f"{figures.hit_ratio_predicted * 100:.1f}",
        "predicted exactly (%)": f"{figures.predicted_exactly_share * 100:.1f}",
        "unexplained (%)": f"{figures.mismatch_unexplained_share * 100:.2f}",
        "busy time max/mean (x)": f"{figures.imbalance:.3f}",
        "errors/requests (count)": f"{figures.errors} / {figures.requests}",
        "router added P50 (ms)": f"{figures.router_added_p50_s * 1000:.2f}",
        "router added P99 (ms)": f"{figures.router_added_p99_s * 1000:.2f}",
    }


def summary_json(
    measured: Sequence[Measured], fleet: FleetConfig, workload: Workload
) -> dict[str, Any]:
    """The content of summary.json."""
    ratios = [each.run.cpu_busy_ratio for each in measured]
    known = [ratio for ratio in ratios if ratio is not None]
    return {
        "policies": as_json({each.run.policy: each.figures for each in measured}),
        "workload": workload.facts(),
        "fleet": {name: _plain(value) for name, value in asdict(fleet).items()},
        # Every run waits for it and fails otherwise (deploy.demo.errors.NotIdleError).
        "counters_zero": True,
        "cpu_busy_ratio": max(known) if known else None,
        "engine_lag_max_s": max((each.run.lag_max_s for each in measured), default=None),
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def write(
    out_dir: Path,
    measured: Sequence[Measured],
    facts: Sequence[tuple[str, str]],
    fleet: FleetConfig,
    workload: Workload,
) -> Paths:
    """Write report.html and summary.json."""
    paths = Paths(report=out_dir / "report.html", summary=out_dir / "summary.json")
    text = json.dumps(summary_json(measured, fleet, workload), indent=2)
    paths.summary.write_text(text + "\n")
    runs = [
        Run(name=each.run.policy, records=each.records, extra_figures=_extra_figures(each.figures))
        for each in measured
    ]
    write_report(paths.report, "Timestable: one workload, several policies", runs, dict(facts))
    return paths


def _extra_figures(figures: PolicyResult) -> dict[str, float | str]:
    """What the client alone cannot know, for the report's table."""
    return {
        "mispredicted, unexplained (%)": 100 * figures.mismatch_unexplained_share,
        "busy time max/mean (x)": figures.imbalance,
        "router added P50 (real ms)": 1000 * figures.router_added_p50_s,
        "router added P99 (real ms)": 1000 * figures.router_added_p99_s,
    }
