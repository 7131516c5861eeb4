"""Pure: agent sessions over a shared tool-and-system prefix.

Shaped by the agentic coding traces of WEKA (github.com/callanjfox/kv-cache-tester, 548 recorded
sessions; p10 / p50 / p90): turns 6 / 36 / 151, at most 439; tool part 9,292 / 11,635 / 12,974
tokens, system part 1,906 / 2,776 / 3,767; first prompt 14,487 / 64,831 / 293,520; growth from one
prompt to the next 205 / 693 / 3,466; answers 106 / 231 / 927; pause of the client 4 / 11 / 188 s,
time of an answer 3.7 / 6.8 / 19.8 s; 96 % of tokens are reused within a session.

From there: medians and p90 of turns, growth, answers, pauses and first prompts (lognormal; pauses
are 3 s plus a lognormal), and that 1 % of prompts are shorter than the one before (compaction or a
new branch). Chosen: all sessions share one tool part, a few system prompts have zipf popularity,
session starts are a Poisson process, a compacted prompt keeps the tool and system part and is as
long as a first one. `length_factor` scales every length, for fleets of small caches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import FreshIds, zipf
from loadgen.workloads.growing import GrowingPrompt, Lengths, blocks_of, check, in_order

_SEED_STREAM = 29
_THINK_MIN_S = 3.0
_THINK_MAX_S = 80_000.0


@dataclass(frozen=True, kw_only=True)  # no slots: jsonargparse reads its fields
class AgentSessions:
    """Shape of the workload. Raises WorkloadError for values that make none.

    Args:
        session_rate: sessions that begin, per second.
        tool_tokens: length of the tool part that all sessions share.
        system_tokens: length of a system prompt, which follows it.
        system_prompts_count: distinct system prompts.
        system_prompt_zipf_exponent: popularity of the k-th is proportional to k^-exponent.
        first_tokens_median: lognormal length of what the first prompt has beyond these.
        first_tokens_sigma: its sigma.
        growth_tokens_median: lognormal growth from one prompt to the next, answer included.
        growth_tokens_sigma: its sigma.
        answer_tokens_median: lognormal length of answers.
        answer_tokens_sigma: its sigma.
        compaction_ratio: chance that a prompt restarts after the tool and system part, 0..1.
        turns_median: lognormal number of requests of a session.
        turns_sigma: its sigma.
        turns_max: most requests of a session.
        think_median_s: lognormal pause of the client, beyond 3 s.
        think_sigma: its sigma.
        answer_median_s: lognormal time of an answer, assumed for the arrivals; in closed loop the
            fleet's own answers count.
        answer_sigma: its sigma.
        prompt_tokens_max: a session ends before its prompt would be longer.
        length_factor: multiplies all lengths but prompt_tokens_max.
        block_size_tokens: grain of block ids.
    """

    session_rate: float = 0.05
    tool_tokens: int = 11_635
    system_tokens: int = 2_776
    system_prompts_count: int = 8
    system_prompt_zipf_exponent: float = 1.0
    first_tokens_median: float = 50_000.0
    first_tokens_sigma: float = 1.34
    growth_tokens_median: float = 693.0
    growth_tokens_sigma: float = 1.256
    answer_tokens_median: float = 231.0
    answer_tokens_sigma: float = 1.084
    compaction_ratio: float = 0.01
    turns_median: float = 36.0
    turns_sigma: float = 1.119
    turns_max: int = 439
    think_median_s: float = 8.0
    think_sigma: float = 2.45
    answer_median_s: float = 6.8
    answer_sigma: float = 0.83
    prompt_tokens_max: int = 1_000_000
    length_factor: float = 1.0
    block_size_tokens: int = 64

    def __post_init__(self) -> None:
        check("agents.session_rate", self.session_rate, least=1e-6)
        check("agents.system_prompts_count", self.system_prompts_count, least=1)
        check("agents.turns_max", self.turns_max, least=1)
        check("agents.compaction_ratio", self.compaction_ratio, most=1)
        check("agents.length_factor", self.length_factor, least=1e-4)
        check("agents.block_size_tokens", self.block_size_tokens, least=1)


def generate_agents(spec: AgentSessions, *, requests_count: int, seed: int) -> Iterator[TraceRow]:
    """Rows in order of arrival, sessions and pauses labelled; equal arguments give equal rows."""
    return in_order(agent_sessions(spec, seed), requests_count)


def agent_sessions(spec: AgentSessions, seed: int) -> Iterator[tuple[float, list[TraceRow]]]:
    """Start and rows of one session after another, without end."""
    generator = np.random.default_rng([seed, _SEED_STREAM])
    ids = FreshIds()
    size, factor = spec.block_size_tokens, spec.length_factor
    tools = ids.take(blocks_of(round(spec.tool_tokens * factor), size))
    system_blocks = blocks_of(round(spec.system_tokens * factor), size)
    systems = [ids.take(system_blocks) for _ in range(spec.system_prompts_count)]
    popularity = np.cumsum(zipf(len(systems), spec.system_prompt_zipf_exponent))
    start_s, session = 0.0, 0
    while True:
        place = min(int(np.searchsorted(popularity, generator.random())), len(systems) - 1)
        prompt = GrowingPrompt(ids, size)
        prompt.share(tools)
        prompt.share(systems[place])
        yield start_s, list(_turns(spec, prompt, start_s, f"agent-{session}", generator))
        start_s += float(generator.exponential(1 / spec.session_rate))
        session += 1


def _turns(
    spec: AgentSessions,
    prompt: GrowingPrompt,
    arrival_s: float,
    session_id: str,
    generator: np.random.Generator,
) -> Iterator[TraceRow]:
    factor = spec.length_factor
    first = Lengths(median=spec.first_tokens_median * factor, sigma=spec.first_tokens_sigma)
    growth = Lengths(median=spec.growth_tokens_median * factor, sigma=spec.growth_tokens_sigma)
    answer = Lengths(median=spec.answer_tokens_median * factor, sigma=spec.answer_tokens_sigma)
    turns = Lengths(median=spec.turns_median, sigma=spec.turns_sigma)
    think_s: float | None = None
    shared_blocks_count = len(prompt.block_ids)
    prompt.grow(first.draw(generator))
    for turn in range(min(spec.turns_max, turns.draw(generator))):
        if prompt.tokens > spec.prompt_tokens_max:
            return
        yield TraceRow(
            arrival_s=round(arrival_s, 6),
            prompt_tokens=prompt.tokens,
            output_tokens=answer.draw(generator),
            block_ids=tuple(prompt.block_ids),
            block_size_tokens=spec.block_size_tokens,
            session_id=session_id,
            turn=turn,
            category="agent",
            think_s=think_s,
        )
        if generator.random() < spec.compaction_ratio:
            prompt.cut(shared_blocks_count)
            prompt.grow(first.draw(generator))
        else:
            prompt.grow(growth.draw(generator))
        think_s = _pause_s(spec, generator)
        arrival_s += _lognormal_s(spec.answer_median_s, spec.answer_sigma, generator) + think_s


def _pause_s(spec: AgentSessions, generator: np.random.Generator) -> float:
    drawn_s = _THINK_MIN_S + _lognormal_s(spec.think_median_s, spec.think_sigma, generator)
    return round(min(drawn_s, _THINK_MAX_S), 3)


def _lognormal_s(median_s: float, sigma: float, generator: np.random.Generator) -> float:
    return float(generator.lognormal(np.log(median_s), sigma))
