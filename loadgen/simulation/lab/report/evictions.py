"""Eviction policies side by side: hit ratio and queued TTFT against the size of the cache. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean
from typing import Final

from loadgen.simulation.lab.figures import RunFigures

_LRU: Final = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRow:
    """One policy at one size of the cache, over all seeds.

    Attributes:
        workload, load: what was asked.
        routing: the routers' policy.
        cache_blocks: of each instance.
        policy: of eviction.
        hit_ratio: hit tokens over prompt tokens.
        queued_ttft_mean_s: from arrival to first token, so what was waited is in it.
        hit_ratio_gain: relative to LRU's at the same place; NaN where LRU was not run or hit
            nothing.
        queued_ttft_gain: likewise, below 0 when it is shorter.
    """

    workload: str
    load: float
    routing: str
    cache_blocks: int
    policy: str
    hit_ratio: float
    queued_ttft_mean_s: float
    hit_ratio_gain: float
    queued_ttft_gain: float


Place = tuple[str, float, str, int]
"""Workload, load, routing policy, blocks: where eviction policies are compared."""


def eviction_rows(runs: Iterable[RunFigures]) -> list[EvictionRow]:
    """One row per place and policy, in the order in which they first appeared."""
    groups: dict[Place, dict[str, list[RunFigures]]] = {}
    for run in runs:
        place = (run.workload, run.load, run.policy, run.capacity_blocks)
        groups.setdefault(place, {}).setdefault(run.eviction, []).append(run)
    rows = []
    for (workload, load, routing, blocks), by_policy in groups.items():
        means = {
            policy: (fmean(run.hit_ratio for run in of), fmean(run.ttft_mean_s for run in of))
            for policy, of in by_policy.items()
        }
        lru = means.get(_LRU, (nan, nan))
        for policy, (hit_ratio, ttft_s) in means.items():
            rows.append(
                EvictionRow(
                    workload=workload,
                    load=load,
                    routing=routing,
                    cache_blocks=blocks,
                    policy=policy,
                    hit_ratio=hit_ratio,
                    queued_ttft_mean_s=ttft_s,
                    hit_ratio_gain=hit_ratio / lru[0] - 1 if lru[0] else nan,
                    queued_ttft_gain=ttft_s / lru[1] - 1 if lru[1] else nan,
                )
            )
    return rows


def eviction_tables(rows: Sequence[EvictionRow]) -> str:
    """Markdown: for each workload, load and routing policy, eviction policies against sizes.

    A cell is the hit ratio and the mean queued TTFT, each with its difference from LRU.
    """
    parts = ["## Eviction policies\n"]
    for workload, load, routing in dict.fromkeys((r.workload, r.load, r.routing) for r in rows):
        here = [r for r in rows if (r.workload, r.load, r.routing) == (workload, load, routing)]
        sizes = sorted({row.cache_blocks for row in here})
        found = {(row.policy, row.cache_blocks): row for row in here}
        heading = " | ".join(f"{blocks:,} blocks" for blocks in sizes)
        lines = [
            f"### {workload}, load {load:g}, {routing}\n",
            f"| eviction | {heading} |",
            f"| --- |{' --- |' * len(sizes)}",
        ]
        for policy in dict.fromkeys(row.policy for row in here):
            cells = [_cell(found.get((policy, blocks))) for blocks in sizes]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(row: EvictionRow | None) -> str:
    if row is None:
        return ""
    told = f"{row.hit_ratio:.1%}, {row.queued_ttft_mean_s:.3g} s"
    if row.policy == _LRU or isnan(row.hit_ratio_gain):
        return told
    return f"{told} ({row.hit_ratio_gain:+.1%}, {row.queued_ttft_gain:+.1%})"
