"""Pure: choose a slice of a trace, and say what the slice is like.

A contiguous stretch of a chat trace loses most of its reuse: follow-up turns arrive minutes, that
is hundreds of requests, after the turn they extend. A short slice that still behaves like the trace
therefore takes whole conversations out of a long stretch, and the schedule (`loadgen.arrivals`)
then brings it to the wanted request rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from loadgen.conversations import conversation_labels, previous_turns
from loadgen.errors import SliceError
from loadgen.trace import TraceRow

ENGINE_BLOCK_SIZE_TOKENS = 16  # vLLM's default, the grain of prefix hits


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpec:
    """What to keep of a trace. The defaults keep everything as it is.

    Args:
        first_row: rows before this one (in order of arrival, from 0) are left out.
        rows_count: rows considered from first_row on; None: to the end.
        whole_conversations: keep a conversation with all its turns or not at all.
        turns_min: with whole_conversations, leave out conversations with fewer turns.
        prompt_tokens_max: leave out longer prompts (and their conversations, when whole).
        requests_max: upper bound on requests kept; whole conversations are drawn with the seed.
        prompt_length_factor: multiplies prompt lengths by resizing the blocks, so reuse is kept.
        output_length_factor: multiplies answer lengths.
        seed: of the draw and of the spread of equal timestamps.
    """

    first_row: int = 0
    rows_count: int | None = None
    whole_conversations: bool = True
    turns_min: int = 1
    prompt_tokens_max: int | None = None
    requests_max: int | None = None
    prompt_length_factor: float = 1.0
    output_length_factor: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Figures of a list of rows; lengths are (p10, p50, p90, max) in tokens.

    Args:
        ideal_hit_ratio: see `ideal_hit_ratio`.
        request_rate: requests per second between first and last arrival; 0 when there is no span.
        turns_mean: requests per conversation.
        multi_turn_ratio: share of requests in conversations of two turns or more.
        turn_gap_p50_s: median time between a turn and the one it follows; None without any.
    """

    requests_count: int
    conversations_count: int
    span_s: float
    request_rate: float
    prompt_tokens_total: int
    output_tokens_total: int
    prompt_tokens_quantiles: tuple[int, int, int, int]
    output_tokens_quantiles: tuple[int, int, int, int]
    turns_mean: float
    multi_turn_ratio: float
    turn_gap_p50_s: float | None
    ideal_hit_ratio: float


def take_slice(rows: Sequence[TraceRow], spec: SliceSpec) -> tuple[TraceRow, ...]:
    """The rows `spec` asks for, arrivals counted from the first of them.

    Every row comes labelled with its session and turn, as found in the whole trace.

    Raises:
        SliceError: nothing is left, or a length factor meets a prompt that has no block ids.
    """
    last = None if spec.rows_count is None else spec.first_row + spec.rows_count
    labels = conversation_labels(rows)
    labelled = spread_equal_arrivals(_with_sessions(rows, labels), seed=spec.seed)
    stretch = labelled[spec.first_row : last]
    if not stretch:
        raise SliceError(
            f"rows {spec.first_row} to {'the end' if last is None else last} are empty: "
            f"the trace has {len(rows)} rows"
        )
    if spec.whole_conversations:
        outside = {*labels[: spec.first_row], *labels[spec.first_row + len(stretch) :]}
        kept = _whole_conversations(stretch, labels[spec.first_row :], outside, spec)
    else:
        kept = [row for row in stretch if _fits(row, spec)][: spec.requests_max]
    if not kept:
        raise SliceError(
            f"no request of {len(stretch)} is left; raise prompt_tokens_max or requests_max, "
            "lower turns_min, or take more rows"
        )
    start_s = kept[0].arrival_s
    return tuple(
        _resize(
            replace(row, arrival_s=row.arrival_s - start_s),
            spec.prompt_length_factor,
            spec.output_length_factor,
        )
        for row in kept
    )


def spread_equal_arrivals(rows: Sequence[TraceRow], *, seed: int) -> tuple[TraceRow, ...]:
    """Rows whose equal timestamps are spread over their step, in unchanged order.

    Traces rounded to a step (3 s in Mooncake's) would otherwise replay as bursts that never
    happened. The step is the smallest gap between distinct arrivals; within it arrivals are
    uniform, as those of a Poisson process are.
    """
    gaps = [after.arrival_s - before.arrival_s for before, after in pairwise(rows)]
    step_s = min((gap for gap in gaps if gap > 0), default=0.0)
    if step_s == 0.0 or all(gap > 0 for gap in gaps):
        return tuple(rows)
    generator = np.random.default_rng(seed)
    spread: list[TraceRow] = []
    first = 0
    for index in range(1, len(rows) + 1):
        if index < len(rows) and gaps[index - 1] == 0:
            continue
        group = rows[first:index]
        offsets = np.sort(generator.random(len(group))) if len(group) > 1 else (0.0,)
        spread += [
            replace(row, arrival_s=row.arrival_s + step_s * float(offset))
            for row, offset in zip(group, offsets, strict=True)
        ]
        first = index
    return tuple(spread)


def ideal_hit_tokens(
    rows: Sequence[TraceRow], *, engine_block_size_tokens: int = ENGINE_BLOCK_SIZE_TOKENS
) -> tuple[int, ...]:
    """Hit tokens of each row with an infinite cache that starts empty.

    The leading tokens seen in earlier rows, less than the prompt (an engine always recomputes the
    last token), floored to the engine's block. Rows without block ids count no hit.
    """
    node_of: dict[tuple[int, int], int] = {}
    filled_of: dict[int, int] = {}  # node -> most tokens of that block seen so far
    hits: list[int] = []
    for row in rows:
        size = row.block_size_tokens
        seen_tokens, seen, node = 0, True, -1
        for position, block_id in enumerate(row.block_ids):
            node = node_of.setdefault((node, block_id), len(node_of))
            filled = min(size, row.prompt_tokens - position * size)
            known = filled_of.get(node, 0)
            if seen:
                seen_tokens += min(filled, known)
                seen = known >= filled
            filled_of[node] = max(filled, known)
        usable = min(seen_tokens, row.prompt_tokens - 1)
        hits.append(usable // engine_block_size_tokens * engine_block_size_tokens)
    return tuple(hits)


def ideal_hit_ratio(
    rows: Sequence[TraceRow], *, engine_block_size_tokens: int = ENGINE_BLOCK_SIZE_TOKENS
) -> float:
    """Sum of `ideal_hit_tokens` over sum of prompt tokens, 0..1: the ceiling for any router."""
    hits = ideal_hit_tokens(rows, engine_block_size_tokens=engine_block_size_tokens)
    return sum(hits) / sum(row.prompt_tokens for row in rows)


def summarise(rows: Sequence[TraceRow]) -> TraceSummary:
    """Figures of `rows` (not empty)."""
    previous = previous_turns(rows)
    labels = np.array(conversation_labels(rows))
    _, turns = np.unique(labels, return_counts=True)
    gaps = [
        row.arrival_s - rows[parent].arrival_s
        for row, parent in zip(rows, previous, strict=True)
        if parent is not None
    ]
    span_s = rows[-1].arrival_s - rows[0].arrival_s
    prompts = [row.prompt_tokens for row in rows]
    outputs = [row.output_tokens for row in rows]
    return TraceSummary(
        requests_count=len(rows),
        conversations_count=len(turns),
        span_s=span_s,
        request_rate=(len(rows) - 1) / span_s if span_s else 0.0,
        prompt_tokens_total=sum(prompts),
        output_tokens_total=sum(outputs),
        prompt_tokens_quantiles=_quantiles(prompts),
        output_tokens_quantiles=_quantiles(outputs),
        turns_mean=float(turns.mean()),
        multi_turn_ratio=float(turns[turns > 1].sum() / len(rows)),
        turn_gap_p50_s=float(np.median(gaps)) if gaps else None,
        ideal_hit_ratio=ideal_hit_ratio(rows),
    )


def summary_lines(summary: TraceSummary) -> dict[str, str]:
    """The summary in words a person reads, by label."""

    def lengths(quantiles: tuple[int, int, int, int]) -> str:
        return "P10 / P50 / P90 / max " + " / ".join(f"{tokens:,}" for tokens in quantiles)

    gap = summary.turn_gap_p50_s
    return {
        "requests": f"{summary.requests_count:,} over {summary.span_s:,.0f} s of the trace",
        "conversations": (
            f"{summary.conversations_count:,}, {summary.turns_mean:.2f} turns on average, "
            f"{summary.multi_turn_ratio:.0%} of requests in conversations of two or more"
            + ("" if gap is None else f", {gap:.0f} s between turns (P50)")
        ),
        "prompt tokens": lengths(summary.prompt_tokens_quantiles),
        "output tokens": lengths(summary.output_tokens_quantiles),
        "ideal hits": f"{summary.ideal_hit_ratio:.1%} of prompt tokens, with an infinite cache",
    }


def _with_sessions(rows: Sequence[TraceRow], labels: Sequence[int]) -> list[TraceRow]:
    """Rows with the missing session ids and turns filled in."""
    turns: dict[int, int] = {}
    labelled: list[TraceRow] = []
    for row, label in zip(rows, labels, strict=True):
        turn = turns[label] = turns.get(label, -1) + 1
        session_id = row.session_id or f"conversation-{label}"
        labelled.append(
            replace(row, session_id=session_id, turn=turn if row.turn is None else row.turn)
        )
    return labelled


def _whole_conversations(
    stretch: Sequence[TraceRow], labels: Sequence[int], outside: set[int], spec: SliceSpec
) -> list[TraceRow]:
    """Rows of the drawn conversations that lie wholly in the stretch and fit the spec."""
    members: dict[int, list[int]] = {}
    for index in range(len(stretch)):
        members.setdefault(labels[index], []).append(index)
    fitting = [
        rows
        for label, rows in members.items()
        if label not in outside
        and len(rows) >= spec.turns_min
        and all(_fits(stretch[index], spec) for index in rows)
    ]
    if spec.requests_max is not None:
        order = np.random.default_rng(spec.seed).permutation(len(fitting))
        drawn: list[list[int]] = []
        left = spec.requests_max
        for conversation in (fitting[int(position)] for position in order):
            if len(conversation) <= left:
                drawn.append(conversation)
                left -= len(conversation)
        fitting = drawn
    return [stretch[index] for index in sorted(index for rows in fitting for index in rows)]


def _fits(row: TraceRow, spec: SliceSpec) -> bool:
    return spec.prompt_tokens_max is None or row.prompt_tokens <= spec.prompt_tokens_max


def _resize(row: TraceRow, prompt_factor: float, output_factor: float) -> TraceRow:
    """The row with its lengths multiplied; the number of blocks, hence reuse, stays."""
    output_tokens = max(1, round(row.output_tokens * output_factor))
    if prompt_factor == 1.0:
        return replace(row, output_tokens=output_tokens)
    if not row.block_ids:
        raise SliceError("a prompt length factor needs rows with block ids; leave it at 1")
    size = max(1, round(row.block_size_tokens * prompt_factor))
    before_last = len(row.block_ids) - 1
    last_filled = row.prompt_tokens - before_last * row.block_size_tokens
    last = min(size, max(1, round(last_filled * prompt_factor)))
    return replace(
        row,
        block_size_tokens=size,
        prompt_tokens=before_last * size + last,
        output_tokens=output_tokens,
    )


def _quantiles(values: Sequence[int]) -> tuple[int, int, int, int]:
    p10, p50, p90 = np.percentile(values, (10, 50, 90), method="nearest")
    return int(p10), int(p50), int(p90), max(values)
