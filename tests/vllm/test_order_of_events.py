"""The simulated engine does what a real one does, step by step: what it stores, evicts and hits."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.vllm.driving import driven
from tests.vllm.settings import MODEL
from tests.vllm.step_scenarios import SCENARIOS, Scenario
from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.kv_events import BlocksRemoved, BlocksStored, KvEvent
from workers.simulated.request import Request, pack_tokens, unpack_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

AHEAD = ("one after another", "at once")
"""Scenarios that are also run with vLLM's default on GPUs, a step scheduled ahead."""

COST = CostModel(
    step_overhead_s=1.0,
    linear_s_per_token=0.0,
    weights_s=0.0,
    experts_s=0.0,
    expert_share=0.0,
    attention_s_per_pair=0.0,
    kv_read_s_per_token=0.0,
)

Block = tuple[int, ...]
"""All tokens up to the end of a block, behind a number for each salt."""


@dataclass
class Story:
    """What an engine did.

    Attributes:
        changes: by step, blocks stored (True) and evicted (False), in order.
        tokens: by step, who got which token, counted from 1, and whether it was the last.
        cached: prompt tokens of each request that were resident when it was admitted.
        preemption_count: how often a request was; None: not known.
    """

    changes: list[list[tuple[bool, Block]]] = field(default_factory=list)
    tokens: list[list[tuple[str, int, bool]]] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    preemption_count: int | None = None

    @property
    def evictions(self) -> int:
        """Blocks evicted, all steps together."""
        return sum(not stored for step in self.changes for stored, _ in step)


class Content:
    """Names blocks by what they hold, whatever an engine's hashes are."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._of: dict[str, Block] = {}

    def stored(self, hashes: Sequence[str], parent: str | None, ids: Sequence[int]) -> list[Block]:
        """Blocks behind one another and behind the parent."""
        before = self._of[parent] if parent is not None else ()
        size = self._block_size
        for place, block_hash in enumerate(hashes):
            before = (*before, *ids[place * size : (place + 1) * size])
            self._of[block_hash] = before
        return [self._of[block_hash] for block_hash in hashes]

    def removed(self, hashes: Sequence[str]) -> list[Block]:
        """Blocks that were stored before."""
        return [self._of[block_hash] for block_hash in hashes]


def real_stories() -> list[Story]:
    """The scenarios in vLLM."""
    wanted = {
        "model": str(MODEL),
        "scenarios": [one.as_json() for one in SCENARIOS.values()],
        "ahead": [SCENARIOS[name].as_json() for name in AHEAD],
    }
    results = driven("step_driver.py", wanted)
    scenarios = [*SCENARIOS.values(), *(SCENARIOS[name] for name in AHEAD)]
    return [real_story(steps, one) for steps, one in zip(results, scenarios, strict=True)]


def real_story(steps: list[dict[str, Any]], scenario: Scenario) -> Story:
    """What the driver wrote."""
    content, story = Content(scenario.block_size_tokens), Story()
    for step in steps:
        changes = []
        for event in step["events"]:
            if event["type"] == "BlockStored":
                blocks = content.stored(event["hashes"], event["parent"], event["tokens"])
                changes += [(True, block) for block in blocks]
            else:
                assert event["type"] == "BlockRemoved", event
                changes += [(False, block) for block in content.removed(event["hashes"])]
        story.changes.append(changes)
        story.tokens.append([(name, count, last) for name, count, last, _ in step["tokens"]])
        for name, _, _, cached in step["tokens"]:
            story.cached.setdefault(name, cached)
    return story


def simulated_story(scenario: Scenario) -> Story:
    """The scenario in the simulated engine."""
    engine = Engine(
        EngineConfig(
            cost=COST,
            block_size_tokens=scenario.block_size_tokens,
            capacity_blocks=scenario.capacity_blocks,
            max_num_seqs=scenario.max_num_seqs,
            max_num_batched_tokens=scenario.max_num_batched_tokens,
            output_ids=[scenario.answer_id],
        )
    )
    content, story = Content(scenario.block_size_tokens), Story()
    aborts = {one.abort_step: one.id for one in scenario.requests if one.abort_step is not None}
    left = list(scenario.requests)
    admitted: dict[str, int] = {}
    while left or engine.running_count or engine.waiting_count:
        now = len(story.changes)
        while left and left[0].step <= now:
            asked = left.pop(0)
            engine.add(
                Request(
                    request_id=asked.id,
                    packed_prompt=pack_tokens(asked.prompt),
                    output_tokens=asked.output_tokens,
                    salt=asked.salt,
                )
            )
        if now in aborts:
            engine.abort(aborts[now])
        step = engine.start_step()
        if step is None:
            story.changes.append([])
            story.tokens.append([])
            continue
        admitted |= {one.request.request_id: one.hit_tokens for one in step.admissions}
        output = engine.finish_step(step)
        story.changes.append(list(changes_of(output.events, content)))
        tokens = [(one.request.request_id, one.position + 1, one.last) for one in output.tokens]
        story.tokens.append(tokens)
        story.cached |= {name: admitted[name] for name, _, _ in tokens}
    story.preemption_count = engine.totals.preemption_count
    return story


def changes_of(events: Sequence[KvEvent], content: Content) -> Iterator[tuple[bool, Block]]:
    """Blocks stored and evicted, in order."""
    for event in events:
        if isinstance(event, BlocksStored):
            parent = event.parent_block_hash
            blocks = content.stored(
                [str(one) for one in event.block_hashes],
                None if parent is None else str(parent),
                unpack_tokens(event.packed_tokens),
            )
            yield from ((True, block) for block in blocks)
        else:
            assert isinstance(event, BlocksRemoved), event
            removed = content.removed([str(one) for one in event.block_hashes])
            yield from ((False, block) for block in removed)


@pytest.fixture(scope="module")
def real() -> dict[str, Story]:
    """All scenarios in vLLM, run once: its imports take longer than they do."""
    names = [*SCENARIOS, *(f"{name}, ahead" for name in AHEAD)]
    return dict(zip(names, real_stories(), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_requests_same_events(real: dict[str, Story], name: str) -> None:
    """Step by step both store and evict the same blocks in order and hand out the same tokens.

    Each request finds the same tokens cached.
    """
    expected, actual = real[name], simulated_story(SCENARIOS[name])
    differing = [
        step
        for step, (theirs, ours) in enumerate(zip(expected.changes, actual.changes, strict=False))
        if theirs != ours
    ]
    assert not differing, f"first step that differs: {differing[0]} of {len(expected.changes)}"
    assert actual.tokens == expected.tokens
    assert actual.cached == expected.cached
    assert expected.evictions >= SCENARIOS[name].capacity_blocks
    assert sum(expected.cached.values()) > 0
    assert bool(actual.preemption_count) == ("preempted" in name)


@pytest.mark.parametrize("name", AHEAD)
def test_scheduling_ahead_changes_no_hit(real: dict[str, Story], name: str) -> None:
    """An engine that schedules a step ahead stores, evicts and hits the same blocks.

    It takes blocks one step earlier and gives them back one step later, so neighbours in the order
    of events may change places; how many tokens a request finds cached does not change here.
    """
    expected, actual = real[f"{name}, ahead"], simulated_story(SCENARIOS[name])
    assert actual.cached == expected.cached
    changes = [Counter(itertools.chain(*story.changes)) for story in (expected, actual)]
    assert changes[0] == changes[1]
