"""Makes deploy/METRICS.md out of the metrics that routers and sidecars really have.

.venv/bin/python tests/metrics_table.py
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics import MetricWrapperBase

ROOT: Final = Path(__file__).parents[1]
TABLE: Final = ROOT / "deploy" / "METRICS.md"

sys.path.insert(0, str(ROOT))

from indexer.telemetry import Telemetry  # noqa: E402 - needs the line above
from router import telemetry  # noqa: E402
from router.fast_histogram import FastHistogram  # noqa: E402

BOUNDED_BY: Final = {
    "bound": "the bounds of the door",
    "by": "two kinds of estimates",
    "call": "kinds of calls to Redis",
    "cause": "enumerated causes",
    "leg": "prefill and decode",
    "change": "stored, removed",
    "fleet": "model scopes that sidecars have announced",
    "how": "three ways of tokenizing",
    "instance": "instances that are there: host:port/rank, removed when they have left",
    "kind": "kinds of notes",
    "limit": "kinds of limits",
    "model": "served models whose tokenizer was loaded, never the name a client asked for",
    "outcome": "enumerated outcomes",
    "partition": "partitions of the fleet",
    "policy": "the policies there are",
    "port": "the two ports of a router",
    "process": "processes of one `--processes`",
    "rank": "ranks of the engine",
    "reason": "enumerated reasons",
    "result": "enumerated results",
    "said": "answers that are told apart",
    "stage": "stages of a request",
    "standing": "watched, taken_out",
    "status": "HTTP statuses",
    "verdict": "exact, over, under",
}
"""Every label, and why it has few values. One that is not here has to be thought about first."""

HEAD: Final = """# Metrics

Made by `tests/metrics_table.py`; a test compares it with what routers and sidecars export.
Histograms have `_bucket`, `_count` and `_sum`. Seconds, tokens and bytes are whole units.
"""


def router_metrics() -> list[MetricWrapperBase]:
    """Of a router process."""
    found = [one for one in vars(telemetry).values() if isinstance(one, MetricWrapperBase)]
    fast = [
        Histogram(one.name, one.text, one.labels, registry=None)
        for one in vars(telemetry).values()
        if isinstance(one, FastHistogram)
    ]
    return sorted([*found, *fast], key=lambda one: one._name)


def sidecar_metrics() -> list[MetricWrapperBase]:
    """Of a sidecar process."""
    told = vars(Telemetry(CollectorRegistry())).values()
    found = {id(one): one for one in told if isinstance(one, MetricWrapperBase)}
    return sorted(found.values(), key=lambda one: one._name)


def labels(metrics: Iterable[Any]) -> set[str]:
    """Of all of them."""
    return {label for one in metrics for label in one._labelnames}


def table() -> str:
    """The whole document."""
    parts = [HEAD]
    groups = (
        ("Router (`/metrics`)", router_metrics()),
        ("Sidecar (`/metrics`)", sidecar_metrics()),
    )
    for title, metrics in groups:
        parts.append(f"## {title}\n\n| metric | kind | labels | what |\n| --- | --- | --- | --- |")
        parts.extend(_row(one) for one in metrics)
        parts.append("")
    used = labels([*router_metrics(), *sidecar_metrics()])
    parts.append(
        "## Labels\n\nNo label has a value that a client can choose.\n\n"
        "| label | bounded by |\n| --- | --- |"
    )
    parts.extend(f"| `{label}` | {BOUNDED_BY.get(label, '?')} |" for label in sorted(used))
    return "\n".join(parts) + "\n"


def _row(one: Any) -> str:
    name = one._name + ("_total" if one._type == "counter" else "")
    text = one._documentation.replace("|", "\\|")
    shown = ", ".join(f"`{label}`" for label in one._labelnames)
    return f"| `{name}` | {one._type} | {shown} | {text} |"


if __name__ == "__main__":
    TABLE.write_text(table())
