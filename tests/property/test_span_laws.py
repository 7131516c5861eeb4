"""The fast engine and the step-by-step one are the same engine."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.request import ChainRequest
from workers.simulated.kv_events import BlocksRemoved, BlocksStored
from workers.simulated.request import (
    TOKEN_BYTES,
    Request,
    extend_hashes,
    output_index,
    pack_tokens,
    root_hash,
)
from workers.simulated.step import EngineTotals

OUTPUT_IDS = range(2)  # few, so that answers are alike and are prompts of others
PROMPT_TOKENS_MAX = 100

COST = CostModel(
    step_overhead_s=1e-3,
    linear_s_per_token=1e-4,
    weights_s=1e-3,
    experts_s=1e-3,
    expert_share=0.1,
    attention_s_per_pair=1e-5,
    kv_read_s_per_token=1e-5,
)


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    seed: int

    def tokens(self) -> list[int]:
        """Prompt and answer, without the newest token."""
        answer = [
            OUTPUT_IDS[output_index(self.seed, position, len(OUTPUT_IDS))]
            for position in range(self.output_tokens - 1)
        ]
        return [*self.prompt, *answer]


@dataclass
class Story:
    """What an engine did, in order; all times in seconds."""

    admissions: list[tuple[str, int, float]] = field(default_factory=list)  # hit tokens, when
    reached: list[tuple[str, bool, bool, float]] = field(default_factory=list)  # first, last
    changes: list[tuple[int, float]] = field(default_factory=list)  # signed, as `BlockChanges`
    seen: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """By arrival: requests in the batch, busy time, blocks stored or evicted until then."""
    totals: EngineTotals | None = None
    used_blocks: int = -1


class Names:
    """Hash chains as small integers."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def __call__(self, block_hash: int) -> int:
        return self._known.setdefault(block_hash, len(self._known))


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    """Requests that share prefixes, repeat and continue each other, alone and many at once."""
    arrivals: list[Arrival] = []
    at_s = 0.0
    for _ in range(draw(st.integers(1, 14))):
        at_s += draw(st.sampled_from([0.0, 0.0, 1e-4, 3e-3, 0.02, 0.1, 1.0])) * draw(
            st.floats(0.5, 1.5)
        )
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=24))
        continues = draw(st.booleans())
        if arrivals and continues:
            earlier = arrivals[draw(st.integers(0, len(arrivals) - 1))].tokens()
            prompt = (earlier + prompt * draw(st.integers(0, 1)))[:PROMPT_TOKENS_MAX]
        arrivals.append(
            Arrival(at_s, tuple(prompt), draw(st.integers(1, 30)), draw(st.integers(0, 1)))
        )
    return arrivals


@st.composite
def configs(draw: st.DrawFn, arrivals: list[Arrival]) -> EngineConfig:
    """Small caches that evict and preempt, small budgets that chunk."""
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    least = max(-(-len(arrival.tokens()) // block_size) for arrival in arrivals)
    return EngineConfig(
        cost=COST,
        block_size_tokens=block_size,
        capacity_blocks=least + draw(st.sampled_from([0, 1, 7, 2 * least, 20 * least])),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 5, 16, 50, 1000])),
        output_ids=OUTPUT_IDS,
    )


def slow_story(config: EngineConfig, arrivals: list[Arrival], names: Names) -> Story:
    """Step by step; who comes at the end of a step joins the next one."""
    engine, story = Engine(config), Story()
    now_s, index = 0.0, 0
    while True:
        while index < len(arrivals) and arrivals[index].at_s <= now_s:
            _add_slow(engine, index, arrivals[index])
            index += 1
        step = engine.start_step()
        if step is None:
            if index == len(arrivals):
                break
            now_s = arrivals[index].at_s
            story.seen[index] = (0, engine.totals.busy_s, len(story.changes))
            continue
        for request, hit_tokens in step.admissions:
            story.admissions.append((request.request_id, hit_tokens, now_s))
        end_s = now_s + step.duration_s
        for coming in range(index, len(arrivals)):
            if now_s < arrivals[coming].at_s < end_s:
                story.seen[coming] = (
                    engine.running_count,
                    engine.totals.busy_s,
                    len(story.changes),
                )
        now_s = end_s
        output = engine.finish_step(step)
        for request, position, last in output.tokens:
            if not position or last:
                story.reached.append((request.request_id, not position, last, now_s))
        for event in output.events:
            if isinstance(event, BlocksStored):
                story.changes += [(names(name), now_s) for name in event.block_hashes]
            elif isinstance(event, BlocksRemoved):
                story.changes += [(~names(name), now_s) for name in event.block_hashes]
    story.totals, story.used_blocks = engine.totals, engine.pool.used_count
    return story


def _add_slow(engine: Engine, index: int, arrival: Arrival) -> None:
    engine.add(
        Request(
            request_id=str(index),
            packed_prompt=pack_tokens(arrival.prompt),
            output_tokens=arrival.output_tokens,
            seed=arrival.seed,
        )
    )


def fast_story(config: EngineConfig, arrivals: list[Arrival], names: Names) -> Story:
    """Event by event: arrivals between the ends of spans."""
    engine, story = SpanEngine(config), Story()
    now_s = 0.0
    for index, arrival in enumerate(arrivals):
        while (end_s := engine.ends_s) is not None and end_s <= arrival.at_s:
            now_s = end_s
            _finish_fast(engine, story, now_s)
            if now_s < arrival.at_s:
                _start_fast(engine, story, now_s)
        if engine.ends_s is None and now_s < arrival.at_s:
            _start_fast(engine, story, now_s)
        now_s = arrival.at_s
        _hear(engine, story, now_s - 2e-3)  # late, then what is left
        _hear(engine, story, now_s)
        story.seen[index] = (engine.running_count, engine.busy_s(now_s), len(story.changes))
        hashes: list[int] = []
        extend_hashes(
            hashes,
            root_hash(None, None),
            pack_tokens(arrival.tokens()),
            config.block_size_tokens * TOKEN_BYTES,
        )
        engine.add(
            ChainRequest(
                request_id=str(index),
                prompt_tokens=len(arrival.prompt),
                output_tokens=arrival.output_tokens,
                blocks=np.array([names(name) for name in hashes], np.int64),
            ),
            now_s,
        )
        if engine.ends_s is None and all(later.at_s > now_s for later in arrivals[index + 1 :]):
            _start_fast(engine, story, now_s)
    while (end_s := engine.ends_s) is not None:
        _finish_fast(engine, story, end_s)
        _start_fast(engine, story, end_s)
    _hear(engine, story, float("inf"))
    story.totals, story.used_blocks = engine.totals, engine.pool.used_count
    return story


def _start_fast(engine: SpanEngine, story: Story, now_s: float) -> None:
    span = engine.start(now_s)
    for request, hit_tokens in span.admissions if span else ():
        story.admissions.append((request.request_id, hit_tokens, now_s))


def _finish_fast(engine: SpanEngine, story: Story, now_s: float) -> None:
    for request, first, last in engine.finish():
        story.reached.append((request.request_id, first, last, now_s))


def _hear(engine: SpanEngine, story: Story, now_s: float) -> None:
    for at_s, signed in engine.changes(now_s):
        assert at_s.max() <= now_s
        story.changes += list(zip(signed.tolist(), at_s.tolist(), strict=True))


@given(st.data())
def test_both_engines_tell_the_same_story(data: st.DataObject) -> None:
    """Same admissions, hits, first tokens, ends, stored and evicted blocks, at the same times."""
    arrivals = data.draw(workloads())
    config = data.draw(configs(arrivals))
    names = Names()
    fast = fast_story(config, arrivals, names)
    slow = slow_story(config, arrivals, names)
    assert slow.admissions == fast.admissions
    assert slow.reached == fast.reached
    assert slow.changes == fast.changes
    assert slow.used_blocks == fast.used_blocks == 0
    for index, (running, busy_s, changes) in slow.seen.items():
        seen = fast.seen[index]
        assert (running, changes) == (seen[0], seen[2])
        assert busy_s == pytest.approx(seen[1], rel=1e-9)
    assert slow.totals is not None
    assert fast.totals is not None
    assert slow.totals.busy_s == pytest.approx(fast.totals.busy_s, rel=1e-9)
    assert replace(slow.totals, busy_s=0.0) == replace(fast.totals, busy_s=0.0)
