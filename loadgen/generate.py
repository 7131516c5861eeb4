"""Pure: a generated chat workload with the shape of published production traces.

Sessions arrive as a Poisson process. A session draws one of a few system prompts (zipf popularity),
a first message and a number of turns; each later prompt is the whole earlier prompt, its answer and
a new message. The user's gap between turns is a short minimum plus an exponential.

Where the defaults come from:

- Mooncake conversation trace (Qin et al., FAST 2025): prompt tokens p10/p50/p90 969/7,181/27,809,
  answer tokens 24/355/604, turns 1.5 on average with p90 2, p99 7, at most 32, gap between turns
  p10/p50/p90 39/123/462 s.
- Wang et al., "KVCache Cache in the Wild", arXiv 2506.02634: an ideal cache hits 54 % to 62 % of
  the tokens of chat workloads, reuse comes from shared system prompts of single-turn requests about
  as much as from further turns, and gaps of reuse are close to exponential.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import FreshIds, zipf

_TURNS_POSSIBLE_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWorkload:
    """Parameters of a generated chat workload; see the module for the source of the defaults.

    Args:
        requests_count: rows generated; the first so many by arrival.
        session_rate: new sessions per second.
        block_size_tokens: grain of block ids; system prompts are whole numbers of blocks.
        system_prompts_count: distinct system prompts.
        system_prompt_zipf_exponent: popularity of the k-th is proportional to k^-exponent.
        system_prompt_tokens_median: lognormal length of a system prompt.
        system_prompt_tokens_sigma: its sigma, of the natural logarithm.
        first_message_tokens_median: lognormal length of what the first turn adds.
        first_message_tokens_sigma: its sigma.
        next_message_tokens_median: lognormal length of what each later turn adds.
        next_message_tokens_sigma: its sigma.
        prompt_tokens_max: a session ends before its prompt would pass this length.
        answer_tokens_median: lognormal length of ordinary answers.
        answer_tokens_sigma: its sigma.
        short_answer_ratio: share of answers that are short (a word, a label).
        short_answer_tokens_median: lognormal length of those, with the same sigma.
        answer_tokens_max: longest answer.
        turns_zipf_exponent: a session has k turns with probability proportional to k^-exponent.
        turns_max: most turns.
        turn_gap_min_s: least time between a turn's arrival and the next.
        turn_gap_mean_s: mean of the exponential added to it.
        seed: equal parameters and seed give an equal workload.
    """

    requests_count: int = 1000
    session_rate: float = 2.2
    block_size_tokens: int = 128
    system_prompts_count: int = 12
    system_prompt_zipf_exponent: float = 1.2
    system_prompt_tokens_median: float = 2900.0
    system_prompt_tokens_sigma: float = 1.2
    first_message_tokens_median: float = 2100.0
    first_message_tokens_sigma: float = 1.6
    next_message_tokens_median: float = 300.0
    next_message_tokens_sigma: float = 1.2
    prompt_tokens_max: int = 126_000
    answer_tokens_median: float = 390.0
    answer_tokens_sigma: float = 0.4
    short_answer_ratio: float = 0.15
    short_answer_tokens_median: float = 20.0
    answer_tokens_max: int = 2000
    turns_zipf_exponent: float = 2.3
    turns_max: int = 32
    turn_gap_min_s: float = 20.0
    turn_gap_mean_s: float = 165.0
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.requests_count >= 1, self.requests_count
        assert self.session_rate > 0, self.session_rate
        assert 1 <= self.turns_max <= _TURNS_POSSIBLE_MAX, self.turns_max
        assert self.system_prompts_count >= 1, self.system_prompts_count


@dataclass(slots=True)
class _Draws:
    """The random choices of a workload, each named once."""

    workload: ChatWorkload
    generator: np.random.Generator = field(init=False)
    turn_probabilities: npt.NDArray[np.float64] = field(init=False)
    prompt_probabilities: npt.NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        w = self.workload
        self.generator = np.random.default_rng(w.seed)
        self.turn_probabilities = zipf(w.turns_max, w.turns_zipf_exponent)
        self.prompt_probabilities = zipf(w.system_prompts_count, w.system_prompt_zipf_exponent)

    def session_gap_s(self) -> float:
        return float(self.generator.exponential(1 / self.workload.session_rate))

    def turn_gap_s(self) -> float:
        w = self.workload
        return w.turn_gap_min_s + float(self.generator.exponential(w.turn_gap_mean_s))

    def turns_count(self) -> int:
        return 1 + int(
            self.generator.choice(len(self.turn_probabilities), p=self.turn_probabilities)
        )

    def system_prompt(self) -> int:
        return int(
            self.generator.choice(len(self.prompt_probabilities), p=self.prompt_probabilities)
        )

    def message_tokens(self, turn: int) -> int:
        w = self.workload
        if turn == 0:
            return self._lognormal(w.first_message_tokens_median, w.first_message_tokens_sigma)
        return self._lognormal(w.next_message_tokens_median, w.next_message_tokens_sigma)

    def answer_tokens(self) -> int:
        w = self.workload
        short = self.generator.random() < w.short_answer_ratio
        median = w.short_answer_tokens_median if short else w.answer_tokens_median
        return min(w.answer_tokens_max, self._lognormal(median, w.answer_tokens_sigma))

    def system_prompt_blocks(self, rank: int) -> int:
        """Length of the system prompt of this popularity rank: spread quantiles, not draws.

        A handful of draws would make the whole workload depend on the luck of the first one.
        """
        w = self.workload
        # The golden ratio spreads the quantiles over any number of ranks, starting at the median.
        quantile = (0.5 + rank * 0.6180339887) % 1
        deviation = w.system_prompt_tokens_sigma * NormalDist().inv_cdf(quantile)
        tokens = w.system_prompt_tokens_median * math.exp(deviation)
        return max(1, round(tokens / w.block_size_tokens))

    def _lognormal(self, median: float, sigma: float) -> int:
        return max(1, round(float(self.generator.lognormal(math.log(median), sigma))))


def generate(workload: ChatWorkload) -> tuple[TraceRow, ...]:
    """The first `requests_count` rows of the workload in order of arrival, sessions labelled."""
    draws = _Draws(workload)
    ids = FreshIds()
    system_prompts = [
        ids.take(draws.system_prompt_blocks(rank)) for rank in range(workload.system_prompts_count)
    ]
    rows: list[TraceRow] = []
    session_starts_s = 0.0
    for session in range(workload.requests_count):  # each session has at least one request
        rows += _session(session, session_starts_s, draws, ids, system_prompts)
        session_starts_s += draws.session_gap_s()
        if session % 64 == 0 and len(rows) >= workload.requests_count:
            rows.sort(key=lambda row: row.arrival_s)
            if rows[workload.requests_count - 1].arrival_s <= session_starts_s:
                break  # no later session can be among the first
    rows.sort(key=lambda row: row.arrival_s)
    return tuple(rows[: workload.requests_count])


def _session(
    session: int,
    starts_s: float,
    draws: _Draws,
    ids: FreshIds,
    system_prompts: list[range],
) -> Iterator[TraceRow]:
    """The turns of one session. Blocks are named once: a partly filled one keeps its id."""
    workload = draws.workload
    size = workload.block_size_tokens
    block_ids = list(system_prompts[draws.system_prompt()])
    prompt_tokens = len(block_ids) * size
    arrival_s = starts_s
    for turn in range(draws.turns_count()):
        prompt_tokens += draws.message_tokens(turn)
        if prompt_tokens > workload.prompt_tokens_max:
            if turn > 0:
                return
            prompt_tokens = workload.prompt_tokens_max
        block_ids = block_ids[: -(-prompt_tokens // size)]
        block_ids += ids.take(-(-prompt_tokens // size) - len(block_ids))
        answer_tokens = draws.answer_tokens()
        yield TraceRow(
            arrival_s=round(arrival_s, 6),
            prompt_tokens=prompt_tokens,
            output_tokens=answer_tokens,
            block_ids=tuple(block_ids),
            block_size_tokens=size,
            session_id=f"session-{session}",
            turn=turn,
        )
        prompt_tokens += answer_tokens
        arrival_s += draws.turn_gap_s()
