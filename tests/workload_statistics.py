"""The statistics that workloads claim, measured on their rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt

from loadgen.slicing import ideal_hit_tokens
from loadgen.trace import TraceRow


def ideal_hits(rows: Sequence[TraceRow]) -> tuple[float, float]:
    """With an infinite cache: hits over prompt tokens, and the share of hits by first turns."""
    hits = ideal_hit_tokens(rows)
    by_first_turns = sum(hit for hit, row in zip(hits, rows, strict=True) if not row.turn)
    return sum(hits) / sum(row.prompt_tokens for row in rows), by_first_turns / sum(hits)


def tokens_of_prompt_before(session: Sequence[TraceRow]) -> int:
    """Over the rows of a session, the leading tokens that each has of the one before."""
    kept_tokens = 0
    for before, after in pairwise(session):
        pairs = zip(before.block_ids, after.block_ids, strict=False)
        same_blocks = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        grown = same_blocks == len(before.block_ids)
        kept_tokens += before.prompt_tokens if grown else same_blocks * before.block_size_tokens
    return kept_tokens


def reuses_of_hottest_blocks(rows: Sequence[TraceRow], share: float) -> float:
    """Share of all reuses that go to the most reused `share` of distinct blocks."""
    uses = Counter(block for row in rows for block in row.full_blocks)
    reuses = np.sort(np.array(list(uses.values())) - 1)[::-1]
    return float(reuses[: round(share * len(reuses))].sum() / reuses.sum())


def reuse_gaps_s(rows: Sequence[TraceRow]) -> npt.NDArray[np.float64]:
    """Of every reuse of a block, the time since its use before."""
    last_s: dict[int, float] = {}
    gaps: list[float] = []
    for row in rows:
        for block in row.full_blocks:
            if block in last_s:
                gaps.append(row.arrival_s - last_s[block])
            last_s[block] = row.arrival_s
    return np.array(gaps)


def turn_gaps_s(rows: Sequence[TraceRow]) -> Iterator[tuple[str, float]]:
    """Category and time since the turn before, of every further turn."""
    last_s: dict[str, float] = {}
    for row in rows:
        assert row.session_id is not None
        if row.session_id in last_s:
            yield row.category or "", row.arrival_s - last_s[row.session_id]
        last_s[row.session_id] = row.arrival_s


def distance_to_exponential(gaps_s: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov distance to the exponential of the same mean, 0..1."""
    ordered = np.sort(np.asarray(gaps_s))
    model = 1 - np.exp(-ordered / ordered.mean())
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.maximum(np.abs(model - steps[:-1]), np.abs(model - steps[1:])).max())
