"""Pure: what generated sessions have in common."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadgen.errors import WorkloadError
from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import FreshIds


@dataclass(slots=True)
class GrowingPrompt:
    """A prompt that begins with shared full blocks and grows by blocks of its own.

    A partly filled block keeps its id when the prompt grows into it.
    """

    ids: FreshIds
    block_size_tokens: int
    block_ids: list[int] = field(default_factory=list)
    tokens: int = 0

    def share(self, block_ids: Sequence[int]) -> None:
        """Append full blocks that others have too; only before any `grow`."""
        assert self.tokens == len(self.block_ids) * self.block_size_tokens, self.tokens
        self.block_ids += block_ids
        self.tokens += len(block_ids) * self.block_size_tokens

    def grow(self, tokens: int) -> None:
        """Append tokens that nobody else has."""
        self.tokens += tokens
        blocks_count = -(-self.tokens // self.block_size_tokens)
        self.block_ids += self.ids.take(blocks_count - len(self.block_ids))

    def cut(self, blocks_count: int) -> None:
        """Keep only so many leading full blocks."""
        self.block_ids = self.block_ids[:blocks_count]
        self.tokens = blocks_count * self.block_size_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A lognormal length: its median and the sigma of its natural logarithm."""

    median: float
    sigma: float = 1.0

    def draw(self, generator: np.random.Generator) -> int:
        """At least 1."""
        return max(1, round(float(generator.lognormal(math.log(self.median), self.sigma))))


def blocks_of(tokens: int, block_size_tokens: int) -> int:
    """Full blocks nearest to a length, at least 1: what is shared is shared in full blocks."""
    return max(1, round(tokens / block_size_tokens))


def check(name: str, value: float, *, least: float = 0.0, most: float = math.inf) -> None:
    """Raises WorkloadError unless `least` <= value <= `most`, with the name of the setting."""
    if not least <= value <= most:
        raise WorkloadError(f"{name} must be {least:g} to {most:g}, got {value:g}")


def in_order(
    sessions: Iterable[tuple[float, Sequence[TraceRow]]], requests_count: int
) -> Iterator[TraceRow]:
    """The first `requests_count` rows by arrival, holding only sessions under way.

    Args:
        sessions: start in seconds and rows, by rising start, without end; no row is earlier than
            its session's start.
        requests_count: rows to give.
    """
    under_way: list[tuple[float, int, TraceRow]] = []
    given = pushed = 0
    for start_s, rows in sessions:
        while under_way and under_way[0][0] <= start_s:
            if given == requests_count:
                return
            yield heapq.heappop(under_way)[2]
            given += 1
        for row in rows:
            heapq.heappush(under_way, (row.arrival_s, pushed, row))
            pushed += 1
