"""What a tier saves and costs, in closed form."""

from array import array
from collections import Counter
from dataclasses import replace

import pytest

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.kv_events import BlocksRemoved, BlocksStored, KvEvent
from workers.simulated.request import Request
from workers.simulated.step import Step
from workers.simulated.tier import KvTier, TierConfig, TierError

BLOCK_SIZE = 4
STEP_S = 1.0
TOKEN_S = 0.25
TIER = TierConfig(capacity_blocks=8, tokens_per_s=64.0, latency_s=0.5)


def make_engine(tier: KvTier | None, capacity_blocks: int = 64) -> Engine:
    """A step takes a second and a quarter of one per token."""
    cost = CostModel(
        step_overhead_s=STEP_S,
        linear_s_per_token=TOKEN_S,
        weights_s=0.0,
        experts_s=0.0,
        expert_share=0.0,
        attention_s_per_pair=0.0,
        kv_read_s_per_token=0.0,
    )
    return Engine(
        EngineConfig(
            cost=cost,
            block_size_tokens=BLOCK_SIZE,
            capacity_blocks=capacity_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            output_ids=(0,),
        ),
        tier,
    )


def play(engine: Engine, *prompts: range, output_tokens: int = 1) -> Step:
    """Requests at once, to their ends; returns the step that admitted them."""
    for number, prompt in enumerate(prompts):
        packed = array("I", prompt).tobytes()
        engine.add(
            Request(request_id=str(number), packed_prompt=packed, output_tokens=output_tokens)
        )
    first = step = engine.start_step()
    while step is not None:
        engine.finish_step(step)
        step = engine.start_step()
    assert first is not None
    return first


def play_told(engine: Engine, prompt: range) -> list[KvEvent]:
    """A request to its end; returns what the engine told meanwhile."""
    packed = array("I", prompt).tobytes()
    engine.add(Request(request_id="r", packed_prompt=packed, output_tokens=1))
    events: list[KvEvent] = []
    while (step := engine.start_step()) is not None:
        events += engine.finish_step(step).events
    return events


def test_an_engine_loads_what_another_one_computed() -> None:
    """Of 18 tokens 16 are in the tier: 0.5 s + 16 / 64 s of loading, and two to compute."""
    tier = KvTier(TIER)
    play(make_engine(tier), range(18))
    step = play(make_engine(tier), range(18))
    assert step.duration_s == STEP_S + 2 * TOKEN_S + 0.5 + 16 / 64
    assert step.admissions[0][1:] == (0, 16)


def test_every_request_waits_for_its_own_load() -> None:
    """Two loads in a step take the time of both."""
    tier = KvTier(TIER)
    play(make_engine(tier), range(9), range(100, 109))
    step = play(make_engine(tier), range(9), range(100, 109))
    assert step.duration_s == STEP_S + 2 * TOKEN_S + 2 * (0.5 + 8 / 64)


def test_the_last_token_is_computed_whatever_the_tier_holds() -> None:
    """Its logits are needed: of 16 tokens in four full blocks only three blocks are loaded."""
    tier = KvTier(TIER)
    play(make_engine(tier), range(16))
    assert play(make_engine(tier), range(16)).admissions[0].tier_hit_tokens == 12


def test_what_the_device_holds_is_not_loaded() -> None:
    """The device has 8 tokens of the prompt, the tier 8 more; the totals tell them apart."""
    tier = KvTier(TIER)
    engine = make_engine(tier)
    play(engine, range(8))
    play(make_engine(tier), range(16))
    step = play(engine, range(20))
    assert step.admissions[0][1:] == (8, 8)
    totals = engine.totals
    assert (
        totals.prefix_hits_tokens,
        totals.tier_hits_tokens,
        totals.prefix_queries_tokens,
    ) == (8, 8, 28)
    assert totals.tier_load_s == 0.5 + 8 / 64


def test_answers_are_not_written() -> None:
    """A prompt that goes on behind an answer finds the tier's blocks up to the prompt before."""
    tier = KvTier(TIER)
    play(make_engine(tier), range(6), output_tokens=12)
    assert len(tier) == 1


def test_a_demoted_block_is_in_the_tier_only_when_its_place_was_taken() -> None:
    """Three prompts of two blocks, and room for four: the third demotes the first, tail first."""
    tier = KvTier(replace(TIER, write="evicted"))
    engine = make_engine(tier, capacity_blocks=4)
    play(engine, range(8))
    play(engine, range(100, 108))
    assert len(tier) == 0
    play(engine, range(200, 208))
    assert len(tier) == 2
    step = play(engine, range(9))  # takes three blocks: of the second prompt two, of the third one
    assert step.admissions[0][1:] == (0, 8)
    assert step.duration_s == STEP_S + TOKEN_S + 0.5 + 8 / 64
    assert len(tier) == 5


def test_the_least_recently_written_chain_goes_first_and_its_tail_before_its_head() -> None:
    """Eight blocks hold one of four, rewritten, and of the other, older one the head."""
    tier = KvTier(TIER)
    old, new = list(range(4)), list(range(10, 14))
    tier.write(new)
    tier.write(old)
    tier.write(new)
    tier.write([20, 21])
    assert (tier.match(old), tier.match(new), len(tier)) == (2, 4, 8)


def test_events_tell_what_a_tier_of_its_own_holds() -> None:
    """Stores and removals of its medium, replayed, are its content; each block is told once."""
    tier = KvTier(TIER, medium="CPU")
    engine = make_engine(tier)
    told: Counter[int] = Counter()
    for begin, length in ((0, 9), (0, 17), (100, 22), (0, 30), (50, 60)):
        for event in play_told(engine, range(begin, begin + length)):
            if isinstance(event, BlocksStored) and event.medium == "CPU":
                told.update(event.block_hashes)
            elif isinstance(event, BlocksRemoved) and event.medium == "CPU":
                told.subtract(event.block_hashes)
        assert set(told.values()) <= {0, 1}
        assert set(+told) == set(tier._kept)
    assert len(tier) == TIER.capacity_blocks


@pytest.mark.parametrize(
    "wrong", [{"capacity_blocks": 0}, {"tokens_per_s": 0.0}, {"latency_s": -1.0}]
)
def test_a_tier_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    """The message names the attribute."""
    values = {"capacity_blocks": 8, "tokens_per_s": 1.0, "latency_s": 0.0} | wrong
    with pytest.raises(TierError, match=next(iter(wrong))):
        TierConfig(**values)
