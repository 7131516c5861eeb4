"""What the demo leaves: the table, report.html and summary.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.audit import Audit
from deploy.config import FleetConfig
from deploy.policy_run import PolicyRun
from deploy.summary import PolicyResult, as_json
from deploy.workload import Workload
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
    table = Table(title="TTFT, TPOT in simulated seconds; router added in real milliseconds")
    table.add_column("")
    for each in measured:
        table.add_column(each.run.policy, justify="right")
    rows = [_cells(each.figures) for each in measured]
    for name in rows[0] if rows else ():
        table.add_row(name, *(row[name] for row in rows))
    console.print(table)


def _cells(figures: PolicyResult) -> dict[str, str]:
    return {
        "TTFT mean": f"{figures.ttft_mean_s:.3f}",
        "TTFT P50": f"{figures.ttft_p50_s:.3f}",
        "TTFT P99": f"{figures.ttft_p99_s:.3f}",
        "TPOT mean": f"{figures.tpot_mean_s:.4f}",
        "TPOT P50": f"{figures.tpot_p50_s:.4f}",
        "TPOT P99": f"{figures.tpot_p99_s:.4f}",
        "hit ratio, actual": f"{figures.hit_ratio_actual:.1%}",
        "hit ratio, predicted": f"{figures.hit_ratio_predicted:.1%}",
        "predicted exactly": f"{figures.predicted_exactly_share:.1%}",
        "mispredicted, unexplained": f"{figures.mismatch_unexplained_share:.2%}",
        "imbalance (max/mean busy)": f"{figures.imbalance:.3f}",
        "errors / requests": f"{figures.errors} / {figures.requests}",
        "router added P50": f"{figures.router_added_p50_s * 1000:.2f}",
        "router added P99": f"{figures.router_added_p99_s * 1000:.2f}",
    }


def summary_json(
    measured: Sequence[Measured], fleet: FleetConfig, workload: Workload
) -> dict[str, Any]:
    """The content of summary.json."""
    shares = [each.run.cpu_busy_share for each in measured]
    known = [share for share in shares if share is not None]
    return {
        "policies": as_json({each.run.policy: each.figures for each in measured}),
        "workload": workload.facts(),
        "fleet": {name: _plain(value) for name, value in asdict(fleet).items()},
        # Every run waits for it and fails otherwise (deploy.fleet_state.NotIdleError).
        "counters_zero": True,
        "cpu_busy_share": max(known) if known else None,
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
        "busy time, largest / mean": figures.imbalance,
        "router added P50 (real ms)": 1000 * figures.router_added_p50_s,
        "router added P99 (real ms)": 1000 * figures.router_added_p99_s,
    }
