"""The fast engine and the step-by-step one are the same engine, alone and sharing a tier."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.eviction.base import Category, EvictionOrder
from workers.simulated.eviction.belady import Future
from workers.simulated.eviction.policies import EVICTIONS, LRU, eviction_order
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.free_order import FreeOrder, free_order
from workers.simulated.fast.request import ChainRequest
from workers.simulated.fast.span import ChainAdmission
from workers.simulated.fast.tier import TierColumns
from workers.simulated.kv_events import BlocksRemoved, BlocksStored
from workers.simulated.request import (
    TOKEN_BYTES,
    Request,
    extend_hashes,
    output_index,
    pack_tokens,
    root_hash,
)
from workers.simulated.step import Admission, EngineTotals, Step
from workers.simulated.tier import KvTier, TierConfig

OUTPUT_IDS = range(2)  # few, so that answers are alike and are prompts of others
PROMPT_TOKENS_MAX = 100
ENGINES_MAX = 2

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
    """A request, when it comes and to which engine."""

    at_s: float
    slot: int
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

    def hashes(self, block_size_tokens: int, tokens: Sequence[int]) -> list[int]:
        """Of the full blocks of some tokens."""
        found: list[int] = []
        stride = block_size_tokens * TOKEN_BYTES
        extend_hashes(found, root_hash(None, None), pack_tokens(tokens), stride)
        return found

    @property
    def category(self) -> Category:
        """Some have the same."""
        return Category("", self.output_tokens % 3)


@dataclass
class Story:
    """What an engine did, in order; all times in seconds."""

    admissions: list[tuple[str, int, int, float]] = field(
        default_factory=list
    )  # hits, tier hits, when
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
            Arrival(
                at_s,
                draw(st.integers(0, ENGINES_MAX - 1)),
                tuple(prompt),
                draw(st.integers(1, 30)),
                draw(st.integers(0, 1)),
            )
        )
    return arrivals


tiers = st.builds(
    TierConfig,
    capacity_blocks=st.sampled_from([1, 3, 10, 1000]),
    tokens_per_s=st.sampled_from([100.0, 3e4]),
    latency_s=st.sampled_from([0.0, 7e-3]),
    write=st.sampled_from(["computed", "evicted"]),
)


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


class SlowPlayer:
    """Step by step."""

    def __init__(
        self,
        config: EngineConfig,
        names: Names,
        tier: KvTier | None,
        order: EvictionOrder | None = None,
    ) -> None:
        self.story = Story()
        self._engine = Engine(config, tier, order)
        self._names = names
        self._step: Step | None = None
        self.ends_s: float | None = None

    def add(self, index: int, arrival: Arrival) -> None:
        """A request comes."""
        engine, story = self._engine, self.story
        if self._step or not engine.running_count:
            seen = (engine.running_count, engine.totals.busy_s, len(story.changes))
            story.seen[index] = seen
        engine.add(
            Request(
                request_id=str(index),
                packed_prompt=pack_tokens(arrival.prompt),
                output_tokens=arrival.output_tokens,
                seed=arrival.seed,
                category=arrival.category,
            )
        )

    def start(self, now_s: float) -> None:
        """Schedule."""
        step = self._step = self._engine.start_step(now_s)
        if step is None:
            return
        self.ends_s = now_s + step.duration_s
        self.story.admissions += [(*admission, now_s) for admission in _named(step.admissions)]

    def finish(self, now_s: float) -> None:
        """The step's end."""
        assert self._step is not None
        output = self._engine.finish_step(self._step)
        self._step = self.ends_s = None
        for request, position, last in output.tokens:
            if not position or last:
                self.story.reached.append((request.request_id, not position, last, now_s))
        for event in output.events:
            if isinstance(event, BlocksStored):
                changes = [self._names(name) for name in event.block_hashes]
            elif isinstance(event, BlocksRemoved):
                changes = [~self._names(name) for name in event.block_hashes]
            self.story.changes += [(signed, now_s) for signed in changes]

    def end(self) -> Story:
        """All it did."""
        self.story.totals = self._engine.totals
        self.story.used_blocks = self._engine.pool.used_count
        return self.story


class FastPlayer:
    """Span by span."""

    def __init__(
        self,
        config: EngineConfig,
        names: Names,
        tier: TierColumns | None,
        order: FreeOrder | None = None,
    ) -> None:
        self.story = Story()
        self._engine = SpanEngine(config, order, tier)
        self._names = names

    @property
    def ends_s(self) -> float | None:
        """Of the span in progress; an arrival may cut it."""
        return self._engine.ends_s

    def add(self, index: int, arrival: Arrival) -> None:
        """A request comes."""
        engine, now_s = self._engine, arrival.at_s
        self._hear(now_s - 2e-3)  # late, then what is left
        self._hear(now_s)
        seen = (engine.running_count, engine.busy_s(now_s), len(self.story.changes))
        self.story.seen[index] = seen
        hashes = arrival.hashes(engine.config.block_size_tokens, arrival.tokens())
        engine.add(
            ChainRequest(
                request_id=str(index),
                prompt_tokens=len(arrival.prompt),
                output_tokens=arrival.output_tokens,
                blocks=np.array([self._names(name) for name in hashes], np.int64),
                category=arrival.category,
            ),
            now_s,
        )

    def start(self, now_s: float) -> None:
        """Schedule."""
        span = self._engine.start(now_s)
        admissions = _named(span.admissions) if span else []
        self.story.admissions += [(*admission, now_s) for admission in admissions]

    def finish(self, now_s: float) -> None:
        """The span's end."""
        for request, first, last in self._engine.finish():
            self.story.reached.append((request.request_id, first, last, now_s))

    def end(self) -> Story:
        """All it did."""
        self._hear(float("inf"))
        self.story.totals = self._engine.totals
        self.story.used_blocks = self._engine.pool.used_count
        return self.story

    def _hear(self, now_s: float) -> None:
        for at_s, signed in self._engine.changes(now_s):
            assert at_s.max() <= now_s
            self.story.changes += list(zip(signed.tolist(), at_s.tolist(), strict=True))


def _named(
    admissions: Sequence[Admission] | Sequence[ChainAdmission],
) -> list[tuple[str, int, int]]:
    return [(request.request_id, *hits) for request, *hits in admissions]


def play(
    players: Sequence[SlowPlayer] | Sequence[FastPlayer], arrivals: list[Arrival]
) -> list[Story]:
    """Ends before arrivals: who comes at the end of a step joins the next one."""
    coming = list(enumerate(arrivals))
    while True:
        due = [player.ends_s for player in players if player.ends_s is not None]
        now_s = min([*due, *(arrival.at_s for _, arrival in coming[:1])], default=None)
        if now_s is None:
            return [player.end() for player in players]
        for player in players:
            if player.ends_s == now_s:
                player.finish(now_s)
        while coming and coming[0][1].at_s == now_s:
            index, arrival = coming.pop(0)
            players[arrival.slot % len(players)].add(index, arrival)
        for player in players:
            if player.ends_s is None:
                player.start(now_s)


def check_same(slow: Story, fast: Story) -> None:
    """To the last bit; busy time is summed up in another order."""
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


@given(st.data())
def test_both_engines_tell_the_same_story(data: st.DataObject) -> None:
    """Same admissions, hits, first tokens, ends, stored and evicted blocks, at the same times."""
    arrivals = data.draw(workloads())
    config = data.draw(configs(arrivals))
    names = Names()
    [slow] = play([SlowPlayer(config, names, None)], arrivals)
    [fast] = play([FastPlayer(config, names, None)], arrivals)
    check_same(slow, fast)


@given(st.data())
def test_engines_that_share_a_tier_tell_the_same_stories(data: st.DataObject) -> None:
    """What one writes the other loads, at the same times; engines differ, so that no step ends tie.

    A tie would be decided by the order of the calls, which spans and steps do not share.
    """
    arrivals = data.draw(workloads())
    config = data.draw(configs(arrivals))
    tier = data.draw(tiers)
    speeds = (COST, replace(COST, step_overhead_s=1.0371e-3))
    configs_ = [replace(config, cost=cost) for cost in speeds]
    names, kept, columns = Names(), KvTier(tier), TierColumns(tier)
    slow = play([SlowPlayer(config, names, kept) for config in configs_], arrivals)
    fast = play([FastPlayer(config, names, columns) for config in configs_], arrivals)
    for one, other in zip(slow, fast, strict=True):
        check_same(one, other)
    assert len(kept) == len(columns) <= tier.capacity_blocks


@given(st.data(), st.sampled_from([name for name in EVICTIONS if name != LRU]))
def test_both_engines_evict_alike_under_every_policy(data: st.DataObject, name: str) -> None:
    """Policies hear the same of either: what is hit, stored and freed, whose it is and when."""
    arrivals = data.draw(workloads())
    config = data.draw(configs(arrivals))
    names, blocks, size = Names(), config.capacity_blocks, config.block_size_tokens
    asked = [(str(at), one.hashes(size, one.prompt)) for at, one in enumerate(arrivals)]
    named = [(request_id, [names(one) for one in chain]) for request_id, chain in asked]
    order = eviction_order(name, blocks, Future(asked))
    [slow] = play([SlowPlayer(config, names, None, order)], arrivals)
    [fast] = play(
        [FastPlayer(config, names, None, free_order(name, blocks, Future(named)))], arrivals
    )
    check_same(slow, fast)
