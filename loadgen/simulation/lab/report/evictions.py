"""Eviction policies side by side: hit ratio and queued TTFT against the size of the cache. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean
from typing import Final

from loadgen.simulation.lab.figures import RunFigures
from loadgen.simulation.lab.report.cells import Shape

LRU: Final = "lru"
"""What others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRow:
    """One policy at one size of the cache, over all seeds.

    Attributes:
        workload, load: what was asked.
        routing: the routers' policy.
        fleet: in words.
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
    fleet: str
    cache_blocks: int
    policy: str
    hit_ratio: float
    queued_ttft_mean_s: float
    hit_ratio_gain: float
    queued_ttft_gain: float

    @property
    def column(self) -> tuple[int, str]:
        """Where it stands among the caches of its workload, load and routing policy."""
        return self.cache_blocks, self.fleet


Place = tuple[str, float, str, str, int]
"""Workload, load, routing policy, fleet, blocks: where eviction policies are compared."""


def eviction_rows(runs: Iterable[RunFigures]) -> list[EvictionRow]:
    """One row per place and policy, in the order in which they first appeared."""
    groups: dict[Place, dict[str, list[RunFigures]]] = {}
    for run in runs:
        place = (run.workload, run.load, run.policy, _fleet(run), run.capacity_blocks)
        groups.setdefault(place, {}).setdefault(run.eviction, []).append(run)
    rows = []
    for (workload, load, routing, fleet, blocks), by_policy in groups.items():
        means = {
            policy: (fmean(run.hit_ratio for run in of), fmean(run.ttft_mean_s for run in of))
            for policy, of in by_policy.items()
        }
        lru = means.get(LRU, (nan, nan))
        for policy, (hit_ratio, ttft_s) in means.items():
            rows.append(
                EvictionRow(
                    workload=workload,
                    load=load,
                    routing=routing,
                    fleet=fleet,
                    cache_blocks=blocks,
                    policy=policy,
                    hit_ratio=hit_ratio,
                    queued_ttft_mean_s=ttft_s,
                    hit_ratio_gain=hit_ratio / lru[0] - 1 if lru[0] else nan,
                    queued_ttft_gain=ttft_s / lru[1] - 1 if lru[1] else nan,
                )
            )
    return rows


def cache_columns(rows: Sequence[EvictionRow]) -> dict[tuple[int, str], str]:
    """Caches in the order of their size, with what to call them: the size, where that is enough."""
    columns = sorted(dict.fromkeys(row.column for row in rows), key=lambda column: column[0])
    sizes = [blocks for blocks, _ in columns]
    return {
        (blocks, fleet): f"{blocks:,} blocks" + (f", {fleet}" if sizes.count(blocks) > 1 else "")
        for blocks, fleet in columns
    }


def eviction_tables(rows: Sequence[EvictionRow]) -> str:
    """Markdown: for each workload, load and routing policy, eviction policies against sizes.

    A cell is the hit ratio and the mean queued TTFT, each with its difference from LRU.
    """
    parts = ["## Eviction policies\n"]
    for workload, load, routing in dict.fromkeys((r.workload, r.load, r.routing) for r in rows):
        here = [r for r in rows if (r.workload, r.load, r.routing) == (workload, load, routing)]
        caches = cache_columns(here)
        found = {(row.policy, row.column): row for row in here}
        heading = " | ".join(caches.values())
        lines = [
            f"### {workload}, load {load:g}, {routing}\n",
            f"| eviction | {heading} |",
            f"| --- |{' --- |' * len(caches)}",
        ]
        for policy in dict.fromkeys(row.policy for row in here):
            cells = [_cell(found.get((policy, column))) for column in caches]
            lines.append(f"| {policy} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _fleet(run: RunFigures) -> str:
    """All of its shape but the policy of eviction, which a run's variant ends with."""
    variant = run.variant
    if run.eviction != LRU:
        variant = variant.removesuffix(run.eviction).rstrip()
    shape = Shape(instances=run.instances, routers=run.routers, staleness_s=run.staleness_s)
    return f"{shape.label}, {variant}" if variant else shape.label


def _cell(row: EvictionRow | None) -> str:
    if row is None:
        return ""
    told = f"{row.hit_ratio:.1%}, {row.queued_ttft_mean_s:.3g} s"
    if row.policy == LRU or isnan(row.hit_ratio_gain):
        return told
    return f"{told} ({row.hit_ratio_gain:+.1%}, {row.queued_ttft_gain:+.1%})"
