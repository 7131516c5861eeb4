"""What router_bench.py plays and what it makes of the answers. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.records import RequestRecord
from loadgen.trace import TraceRow

BLOCK = 16
PREFILL_TOKENS_PER_S = 12_000  # of one engine of the profile a100-llama-3.1-8b
GROUPS, GROUP_BLOCKS = 8, 64  # chats share one of so many system prompts
TURNS, TURN_GAP_S = 3, (2.0, 4.0)
FIRST_BLOCKS, LATER_BLOCKS = (64, 320), (12, 48)
CALL_BLOCKS = (32, 512)
OUTPUT_TOKENS = (16, 64)
CHATS_RATIO = 0.6  # of the load; API calls, which share nothing, are the rest
FIGURES = (
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "hit_ratio",
    "prefilled_cv",
    "batch_max_over_mean",
)
SMALL_RATIO = 0.03


def schedule(seed: int, *, engines: int, load_ratio: float, length_s: float) -> list[TraceRow]:
    """Chats with shared beginnings and follow-ups, and API calls; arrivals in engine seconds.

    The load is new prefill tokens, as if every follow-up and system prompt were found, over what
    the engines can prefill. Follow-ups come at their time, whether or not the answer before has
    ended.
    """
    rng = np.random.default_rng(seed)
    next_id = 1_000_000 * (seed + 1)

    def fresh(lengths: tuple[int, int]) -> list[int]:
        nonlocal next_id
        ids = list(range(next_id, next_id + int(rng.integers(*lengths))))
        next_id += len(ids)
        return ids

    def row(at_s: float, blocks: Sequence[int]) -> TraceRow:
        return TraceRow(
            arrival_s=at_s,
            prompt_tokens=len(blocks) * BLOCK,
            output_tokens=int(rng.integers(*OUTPUT_TOKENS)),
            block_ids=tuple(blocks),
            block_size_tokens=BLOCK,
        )

    def arrivals(ratio: float, tokens: float) -> list[float]:
        rate = load_ratio * ratio * engines * PREFILL_TOKENS_PER_S / tokens
        gaps_s = rng.exponential(1 / rate, int(rate * length_s))
        return [float(at_s) for at_s in np.cumsum(gaps_s)]

    rows = []
    chat_blocks = np.mean(FIRST_BLOCKS) + (TURNS - 1) * np.mean(LATER_BLOCKS)
    for start_s in arrivals(CHATS_RATIO, float(chat_blocks) * BLOCK):
        group = int(rng.integers(GROUPS))
        blocks = [*range(group * GROUP_BLOCKS, (group + 1) * GROUP_BLOCKS), *fresh(FIRST_BLOCKS)]
        at_s = start_s
        for _ in range(TURNS):
            rows.append(row(at_s, blocks))
            at_s += float(rng.uniform(*TURN_GAP_S))
            blocks = [*blocks, *fresh(LATER_BLOCKS)]
    calls = arrivals(1 - CHATS_RATIO, float(np.mean(CALL_BLOCKS)) * BLOCK)
    rows += [row(at_s, fresh(CALL_BLOCKS)) for at_s in calls]
    return sorted((one for one in rows if one.arrival_s < length_s), key=lambda one: one.arrival_s)


def run_figures(
    records: Sequence[RequestRecord],
    batches: Sequence[Sequence[int]],
    *,
    engines: int,
    speedup: float,
) -> dict[str, float]:
    """One run's figures; times in engine seconds.

    Args:
        records: of all requests; every one was answered.
        batches: samples of running + waiting on each engine.
        engines: how many there are.
        speedup: engine seconds in a real one.
    """
    ttft, tpot, prefilled = [], [], dict.fromkeys(range(engines), 0)
    names: dict[str | None, int] = {}
    for one in records:
        assert one.error is None, one
        assert one.sent_s is not None, one
        assert one.first_token_s is not None, one
        ttft.append((one.first_token_s - one.sent_s) * speedup)
        times = one.token_times_s
        if len(times) > 1:
            tpot.append((times[-1] - times[0]) / (len(times) - 1) * speedup)
        place = names.setdefault(one.instance, len(names))
        prefilled[place] += one.prompt_tokens - (one.cached_tokens or 0)
    tokens = np.array(list(prefilled.values()), float)
    busy = [np.array(sample) for sample in batches if sum(sample) >= engines]
    return {
        "ttft_mean_s": float(np.mean(ttft)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "tpot_mean_s": float(np.mean(tpot)),
        "hit_ratio": sum(one.cached_tokens or 0 for one in records)
        / sum(one.prompt_tokens for one in records),
        "prefilled_cv": float(tokens.std() / tokens.mean()),
        "batch_max_over_mean": float(np.mean([one.max() / one.mean() for one in busy] or [0.0])),
        "requests": len(records),
        "prefilled_tokens": float(tokens.sum()),
    }


def cell_figures(
    runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """A cell beside one router's, both by seed in the same order.

    `difference_ratio` is of the means over seeds; `paired_error_ratio` the standard error of the
    differences seed by seed; `spread_ratio` one router's standard deviation from seed to seed. All
    are relative to one router's mean. `within`: at most 3 %, or at most the spread.
    `clear`: more than twice the paired error, so not noise.
    """
    cell: dict[str, Any] = {}
    for name in FIGURES:
        mine, its = (np.array([run[name] for run in some]) for some in (runs, base))
        mean = float(its.mean())
        degrees = min(1, len(its) - 1)
        error = float((mine - its).std(ddof=degrees)) / len(its) ** 0.5 / mean
        difference, spread = float(mine.mean()) / mean - 1, float(its.std(ddof=degrees)) / mean
        cell[name] = {
            "mean": round(float(mine.mean()), 5),
            "by_seed": [round(float(value), 5) for value in mine],
            "difference_ratio": round(difference, 4),
            "paired_error_ratio": round(error, 4),
            "spread_ratio": round(spread, 4),
            "within": abs(difference) <= max(SMALL_RATIO, spread),
            "clear": abs(difference) > 2 * error and len(its) > 1,
        }
    return cell


def table(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a cell: mean, difference from one router, `!` where neither small nor in spread."""
    width = max(len(name) for name in cells) + 2
    lines = ["".ljust(width) + "".join(name.rjust(22) for name in FIGURES)]
    for name, cell in cells.items():
        texts = []
        for figure in FIGURES:
            one = cell[figure]
            mark = " " if one["within"] else "!"
            mark += "*" if one["clear"] else " "
            texts.append(f"{one['mean']:.4g} {one['difference_ratio']:+.1%}{mark}".rjust(22))
        lines.append(name.ljust(width) + "".join(texts))
    first = next(iter(cells.values()))
    spreads = [f"{first[figure]['spread_ratio']:.1%}  ".rjust(22) for figure in FIGURES]
    lines.append("seed to seed".ljust(width) + "".join(spreads))
    lines.append("! beyond 3 % and beyond the spread; * beyond twice the paired standard error")
    return "\n".join(lines)
