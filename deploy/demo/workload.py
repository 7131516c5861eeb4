"""What the demo replays: which requests, how fast, on engines of which size; and why.

Chosen so that policies can differ at all: the fleet is busy but does not drown, prompts share
prefixes, and an engine's KV$ holds a useful part of them but not everything.
"""

import os
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.demo.capacity import IN_FLIGHT, busy_s_per_request
from deploy.demo.config import GENERATED, DemoConfig
from deploy.demo.errors import WorkloadError
from deploy.local.config import FleetConfig
from loadgen import slicing
from loadgen.arrivals import Schedule, replay
from loadgen.errors import LoadgenError
from loadgen.generate import ChatWorkload, generate
from loadgen.tokens import PromptTokens
from loadgen.trace import TraceRow, read_trace
from workers.simulated.cost_model import Profile, load_profile

OPTIONAL_TRACE = Path("../shared/traces/mooncake_conversation.jsonl.gz")
"""Where a copy of the recorded trace may lie beside the repository."""

HOW_TO_GET_THE_TRACE = (
    "the recorded one: FAST25-release/traces/conversation_trace.jsonl of "
    "github.com/kvcache-ai/Mooncake (Apache-2.0), then make demo TRACE=conversation_trace.jsonl"
)
VOCABULARY_TOKENS = 4_000
"""Below the size of the simulated model's vocabulary; small ids make small request bodies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of one run and what they were fitted to. Times are simulated seconds.

    Attributes:
        source: where the rows come from, for a person.
        rows: the requests.
        schedule: when each is sent.
        summary: figures of the rows.
        working_set_tokens: distinct prompt tokens.
        capacity_rate: requests a second the fleet can serve, estimated (`deploy.demo.capacity`).
        request_rate: requests a second sent.
        speedup: simulated seconds per real second.
        capacity_blocks: KV$ blocks of each engine.
    """

    source: str
    rows: tuple[TraceRow, ...]
    schedule: Schedule
    summary: slicing.TraceSummary
    working_set_tokens: int
    capacity_rate: float
    request_rate: float
    speedup: float
    capacity_blocks: int

    def prompts(self) -> list[Sequence[int]]:
        """Token ids of every row's prompt."""
        tokens = PromptTokens(vocabulary_tokens=VOCABULARY_TOKENS)
        return [_prompt(tokens, row) for row in self.rows]

    def facts(self) -> dict[str, Any]:
        """Figures for the summary file."""
        return {
            "source": self.source,
            **asdict(self.summary),
            "working_set_tokens": self.working_set_tokens,
            "capacity_rate": self.capacity_rate,
            "request_rate": self.request_rate,
            "capacity_ratio": self.request_rate / self.capacity_rate,
            "speedup": self.speedup,
        }


def _prompt(tokens: PromptTokens, row: TraceRow) -> Sequence[int]:
    if row.token_ids is not None:
        return row.token_ids
    token_ids = tokens.token_ids(
        row.block_ids, prompt_tokens=row.prompt_tokens, block_size_tokens=row.block_size_tokens
    )
    return array("I", token_ids.tolist())


def find_rows(config: DemoConfig) -> tuple[str, tuple[TraceRow, ...]]:
    """Where the rows come from, and the rows.

    Raises:
        WorkloadError: the named trace cannot be read or has rows with text only.
    """
    name = config.trace or os.environ.get("TRACE") or None
    if name is None and OPTIONAL_TRACE.exists():
        name = str(OPTIONAL_TRACE)
    if name in (None, GENERATED):
        rows = generate(ChatWorkload(requests_count=config.rows, seed=config.seed))
        return f"generated chat workload, seed {config.seed} ({HOW_TO_GET_THE_TRACE})", rows
    if not Path(str(name)).is_file():
        raise WorkloadError(f"trace: there is no file {name}")
    try:
        rows = read_trace(str(name)).rows
    except LoadgenError as error:
        raise WorkloadError(f"trace: {error}") from error
    if any(row.text is not None for row in rows):
        raise WorkloadError(f"{name}: the demo needs block_ids or token_ids, not text")
    return f"recorded trace {name}", rows


def choose(config: DemoConfig, fleet: FleetConfig) -> Workload:
    """Choose requests, rate, speed-up and cache size.

    Args:
        config: what the demo is asked for.
        fleet: the engines; its speed-up and cache size are not looked at.

    Raises:
        WorkloadError: see `find_rows`; or no conversation fits.
    """
    source, found = find_rows(config)
    spec = slicing.SliceSpec(
        rows_count=config.rows,
        turns_min=config.turns_min,
        prompt_tokens_max=config.prompt_tokens_max,
        requests_max=config.requests,
        output_length_factor=config.output_length_factor,
        seed=config.seed,
    )
    try:
        rows = slicing.take_slice(found, spec)
    except LoadgenError as error:
        raise WorkloadError(f"{source}: {error}") from error
    profile = load_profile(config.profile)
    busy_s = busy_s_per_request(
        rows,
        profile=profile,
        prompts=PromptTokens(vocabulary_tokens=VOCABULARY_TOKENS),
        block_size_tokens=fleet.block_size_tokens,
        max_num_batched_tokens=fleet.max_num_batched_tokens,
    )
    capacity_rate = fleet.workers / busy_s
    request_rate = config.capacity_ratio * capacity_rate
    schedule = replay([row.arrival_s for row in rows], request_rate=request_rate)
    summary = slicing.summarise(rows)
    working_set_tokens = round(summary.prompt_tokens_total * (1 - summary.ideal_hit_ratio))
    return Workload(
        source=source,
        rows=rows,
        schedule=schedule,
        summary=summary,
        working_set_tokens=working_set_tokens,
        capacity_rate=capacity_rate,
        request_rate=request_rate,
        speedup=schedule[-1] / config.run_s,
        capacity_blocks=_capacity_blocks(config, fleet, profile, working_set_tokens),
    )


def _capacity_blocks(
    config: DemoConfig, fleet: FleetConfig, profile: Profile, working_set_tokens: int
) -> int:
    """KV$ of an engine: a share of the working set, at most the device, at least a small batch."""
    wanted_tokens = min(config.cache_ratio * working_set_tokens, profile.capacity_tokens)
    batch_tokens = 4.0 * config.prompt_tokens_max
    return int(max(wanted_tokens, batch_tokens) / fleet.block_size_tokens)


def describe(
    workload: Workload, config: DemoConfig, fleet: FleetConfig
) -> tuple[tuple[str, str], ...]:
    """What was chosen and why, for a person: (subject, sentence)."""
    summary = workload.summary
    prompts, outputs = summary.prompt_tokens_quantiles, summary.output_tokens_quantiles
    cache_tokens = workload.capacity_blocks * fleet.block_size_tokens
    cache_ratio = cache_tokens / workload.working_set_tokens
    requests = (
        f"{summary.requests_count} requests of {summary.conversations_count} whole conversations "
        f"of at least {config.turns_min} turns; prompts p50 {prompts[1]:,}, p90 {prompts[2]:,}, "
        f"max {prompts[3]:,} tokens; answers p50 {outputs[1]:,}, p90 {outputs[2]:,} tokens, "
        f"{config.output_length_factor:g} of the original length"
    )
    rate = (
        f"{workload.request_rate:.2f} requests/s, {config.capacity_ratio:.0%} of the fleet's "
        f"capacity of {workload.capacity_rate:.2f}: engines / busy time per request of one engine "
        f"with {IN_FLIGHT} requests in flight and an ideal cache"
    )
    engines = (
        f"{fleet.workers} x {config.profile}, each with a KV$ of {cache_tokens:,} tokens, "
        f"{cache_ratio:.0%} of the {workload.working_set_tokens:,} distinct prompt tokens"
    )
    clocks = (
        f"the engines' clocks run {workload.speedup:.2f} times as fast as ours; every time is in "
        "their seconds, except what the router adds"
    )
    arrivals = (
        "conversations arrive at the trace's times (open loop); a follow-up turn waits for the "
        "answer before it (closed loop), so one whose time comes earlier is sent later, by design"
    )
    return (
        ("workload", workload.source),
        ("requests", requests),
        ("reuse", f"an ideal cache could reuse {summary.ideal_hit_ratio:.0%} of the prompt tokens"),
        ("rate", rate),
        ("arrivals", arrivals),
        ("engines", engines),
        ("time", clocks),
    )
