"""What proxy_bench.py prints: a table, and where this router loses."""

from collections.abc import Sequence
from typing import Any


def line(run: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"{run['target'] + ' ' + run['policy']:26}{run['streams']:5}{run['prompt_tokens']:8}  "
        f"{run['turn']:10}{run['requests']:6}{run['errors']:5}"
        f"{run['cpu_us_per_request']:10.0f}{run['cpu_us_per_chunk']:8.1f}"
        f"{run['cpu_us_per_chunk_spread']:7.1f}"
        f"{run['added_p50_s'] * 1e3:9.2f}{run['added_p99_s'] * 1e3:9.2f}"
        f"{run['rps_per_core']:9.0f}{run['rss_mib']:8.0f}"
    )


HEADING = (
    f"{'target, policy':26}{'strms':>5}{'prompt':>8}  {'turn':10}{'reqs':>6}{'errs':>5}"
    f"{'us/req':>10}{'us/chk':>8}{'spread':>7}{'+p50 ms':>9}{'+p99 ms':>9}{'rps/core':>9}"
    f"{'RSS MiB':>8}"
)


def bars(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Where this router keeps its bars and where it loses, cell by cell."""
    ours = [run for run in runs if run["target"] == "ours"]
    peers = [run for run in runs if run["target"] not in {"ours", "direct"}]
    first_tokens = min(run["prompt_tokens"] for run in runs)
    lines = []
    for mine in ours:
        cell = [mine[key] for key in ("streams", "prompt_tokens", "turn")]
        where = "{} streams, {} tokens, {}".format(*cell)
        rivals = [
            one
            for one in peers
            if [one[key] for key in ("streams", "prompt_tokens", "turn")] == cell
        ]
        for figure, unit in (
            ("cpu_us_per_chunk", "us a chunk"),
            ("cpu_us_per_request", "us a request"),
            ("rss_mib", "MiB"),
        ):
            if figure == "cpu_us_per_chunk" and (cell[1], cell[2]) != (first_tokens, "first"):
                continue  # measured once for so many streams
            better = [one for one in rivals if one[figure] < mine[figure]]
            if better:
                names = ", ".join(
                    f"{one['target']} {one['policy']} {one[figure]:g}" for one in better
                )
                lines.append(f"loses: {where}: {mine[figure]:g} {unit}; {names}")
        if mine["added_p50_s"] > 0.0015 and mine["prompt_tokens"] <= 8_192:
            lines.append(f"above 1.5 ms: {where}: added P50 {mine['added_p50_s'] * 1e3:.2f} ms")
    return lines
