"""The rows of a scenario's workload, at a rate. Reads traces; the rest is pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from loadgen import arrivals
from loadgen.conversations import previous_turns
from loadgen.generate import ChatWorkload, generate
from loadgen.simulation.lab.scenario import ScenarioError, Traces, WorkloadSpec
from loadgen.slicing import SliceSpec, take_slice
from loadgen.trace_row import TraceRow
from loadgen.workloads.agents import AgentSessions, generate_agents
from loadgen.workloads.cache_mix import API_MIX, CHAT_MIX, CacheMix, generate_mix
from loadgen.workloads.hot_prefix import HotPrefix, generate_hot_prefix
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.ordering import by_arrival
from loadgen.workloads.pacing import rescale
from loadgen.workloads.reading import Span, read_rows

_SPAN_OPTIONS = ("from_s", "duration_s", "rows_max", "lines_max")
_ROWS_PER_KEPT = 4
"""Generated rows for each wanted one, where sessions are cut short."""


def base_rows(
    spec: WorkloadSpec, traces: Traces, *, requests_count: int, seed: int
) -> tuple[TraceRow, ...]:
    """The workload's first rows at a rate of their own, labelled, by rising arrival.

    Args:
        spec: which.
        traces: where its files may be.
        requests_count: as many as this, if there are.
        seed: of what is generated, and of the spread of equal timestamps.

    Raises:
        ScenarioError: options that the trace or the generator does not have.
        TraceError, SliceError, WorkloadError: as the readers and generators.
    """
    paths = traces.paths(spec)
    try:
        if paths is not None:
            read: dict[str, Any] = dict(spec.read)
            span = Span(**{name: read.pop(name) for name in _SPAN_OPTIONS if name in read})
            options = ReadOptions(**read, seed=seed)
            rows: Iterable[TraceRow] = by_arrival(read_rows(paths, options, span))
        else:
            is_cut = spec.turns_max or spec.prompt_tokens_max
            factor = _ROWS_PER_KEPT if is_cut else 1
            rows = _generated(spec, requests_count=factor * requests_count, seed=seed)
    except TypeError as error:
        raise ScenarioError(f"workload {spec.name}: {error}") from error
    if spec.turns_max is not None or spec.think_max_s is not None:
        rows = _shortened(rows, spec)
    kept = take_slice(
        tuple(rows),
        SliceSpec(
            whole_conversations=spec.prompt_tokens_max is not None,
            prompt_tokens_max=spec.prompt_tokens_max,
            prompt_length_factor=spec.prompt_length_factor,
            seed=seed,
        ),
    )
    return kept[:requests_count]


def at_rate(rows: Sequence[TraceRow], spec: WorkloadSpec, rate: float) -> tuple[TraceRow, ...]:
    """The rows at so many requests per second.

    Raises:
        SliceError, WorkloadError: all arrive at the same time.
    """
    if spec.stretch == "sessions":
        return rescale(rows, request_rate=rate)
    times_s = arrivals.replay([row.arrival_s for row in rows], request_rate=rate)
    factor = (times_s[-1] / (rows[-1].arrival_s - rows[0].arrival_s)) if len(rows) > 1 else 1.0
    return tuple(
        replace(
            row,
            arrival_s=time_s,
            think_s=None if row.think_s is None else row.think_s * factor,
        )
        for row, time_s in zip(rows, times_s, strict=True)
    )


def _generated(spec: WorkloadSpec, *, requests_count: int, seed: int) -> Iterable[TraceRow]:
    options: dict[str, Any] = dict(spec.options)

    def mix(shape: CacheMix) -> Iterator[TraceRow]:
        return generate_mix(replace(shape, **options), requests_count=requests_count, seed=seed)

    makers: dict[str, Callable[[], Iterable[TraceRow]]] = {
        "chat": lambda: generate(ChatWorkload(requests_count=requests_count, seed=seed, **options)),
        "chat_mix": lambda: mix(CHAT_MIX),
        "api_mix": lambda: mix(API_MIX),
        "hot_prefix": lambda: generate_hot_prefix(
            HotPrefix(**options), requests_count=requests_count, seed=seed
        ),
        "agents": lambda: generate_agents(
            AgentSessions(**options), requests_count=requests_count, seed=seed
        ),
    }
    return makers[spec.generate]()


def _shortened(rows: Iterable[TraceRow], spec: WorkloadSpec) -> Iterator[TraceRow]:
    """Sessions of fewer turns and shorter pauses, in the order of their new arrivals."""
    kept = tuple(rows)
    earlier_s: list[float] = []  # by how much each row comes earlier than in the trace
    moved: list[TraceRow] = []
    turns: list[int] = []
    for row, parent in zip(kept, previous_turns(kept), strict=True):
        cut_s = 0.0 if parent is None else earlier_s[parent]
        if row.think_s is not None and spec.think_max_s is not None:
            cut_s += max(0.0, row.think_s - spec.think_max_s)
        earlier_s.append(cut_s)
        turns.append(0 if parent is None else turns[parent] + 1)
        if spec.turns_max is None or turns[-1] < spec.turns_max:
            think_s = (
                None if row.think_s is None else min(row.think_s, spec.think_max_s or row.think_s)
            )
            moved.append(replace(row, arrival_s=max(0.0, row.arrival_s - cut_s), think_s=think_s))
    return iter(sorted(moved, key=lambda row: row.arrival_s))
