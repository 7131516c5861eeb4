"""A virtual fleet with a tier: what routers count on is what engines load."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest

from loadgen.simulation.lab.demand import Demand, demanded
from loadgen.simulation.lab.fleet import LabFleet, LabRun
from loadgen.simulation.lab.spec import LabSpec
from loadgen.trace_row import TraceRow
from router.policies.round_robin import RoundRobin
from router.snapshot import FleetSnapshot, RequestView, Scores
from workers.simulated.tier import TierConfig

TIER = TierConfig(capacity_blocks=400, tokens_per_s=100_000.0, latency_s=0.005)
"""Too small for all that is asked, so it drops some."""

REQUESTS = 60
ROW_BLOCK_TOKENS = 160
AMPLE_BLOCKS, SMALL_BLOCKS = 1 << 14, 300
APART_S = 30.0  # each request is alone, and everybody knows of the one before


@dataclass
class Looking:
    """Round robin that keeps what it saw of the tier, by request."""

    name: str = "looking"
    rule: RoundRobin = field(default_factory=RoundRobin)
    seen: list[list[int]] = field(default_factory=list)

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        if len(self.seen) == request.sequence:
            nothing = np.zeros(len(fleet.instances), np.int64)
            self.seen.append((nothing if fleet.tier_tokens is None else fleet.tier_tokens).tolist())
        return self.rule(request, fleet)


def demand() -> Demand:
    """Prompts of 1 to 20 of the rows' blocks that begin alike in four ways."""
    drawn = np.random.default_rng(7)
    rows = []
    for place in range(REQUESTS):
        family, blocks = int(drawn.integers(4)), int(drawn.integers(1, 21))
        rows.append(
            TraceRow(
                arrival_s=place * APART_S,
                prompt_tokens=ROW_BLOCK_TOKENS * blocks - int(drawn.integers(ROW_BLOCK_TOKENS)),
                output_tokens=4,
                block_ids=tuple(100 * family + block for block in range(blocks)),
                block_size_tokens=ROW_BLOCK_TOKENS,
            )
        )
    return demanded(rows, pace="timestamps", block_size_tokens=16)


def play(tier: TierConfig | None, policy: Looking, capacity_blocks: int = AMPLE_BLOCKS) -> LabRun:
    """Three instances, that evict nothing unless they are made small."""
    spec = LabSpec(instances=3, tier=tier, capacity_blocks=capacity_blocks)
    return LabFleet(spec, policy, demand(), seed=1).play()


def test_routers_count_on_what_engines_load() -> None:
    """Request by request, on the instance it went to; a part is loaded, never more than asked."""
    policy = Looking()
    requests = play(TIER, policy).requests
    assert requests.tier_hit_tokens is not None
    predicted = [seen[slot] for seen, slot in zip(policy.seen, requests.slot, strict=True)]
    assert requests.tier_hit_tokens.tolist() == predicted
    loaded, asked = requests.tier_hit_tokens.sum(), requests.prompt_tokens.sum()
    assert 0.1 < loaded / asked < 0.9
    assert (requests.hit_tokens + requests.tier_hit_tokens < requests.prompt_tokens).all()


def test_a_tier_leaves_local_hits_as_they_are_and_saves_time() -> None:
    """The same requests on the same instances, answered sooner on the whole."""
    alone, tiered = (play(tier, Looking()).requests for tier in (None, TIER))
    assert alone.tier_hit_tokens is not None
    assert not alone.tier_hit_tokens.any()
    assert tiered.slot.tolist() == alone.slot.tolist()
    assert tiered.hit_tokens.tolist() == alone.hit_tokens.tolist()
    ttft_s = [run.first_token_s - run.arrived_s for run in (alone, tiered)]
    assert ttft_s[1].sum() < ttft_s[0].sum()


@pytest.mark.parametrize("write", ["computed", "evicted"])
def test_what_is_loaded_displaces_no_more_than_what_is_computed(
    write: Literal["computed", "evicted"],
) -> None:
    """Device hits of the same requests on the same small instances are the same without a tier.

    So where they fall behind routers that see a tier, it is because these choose other instances.
    """
    tier = replace(TIER, write=write)
    ample = play(None, Looking()).requests
    alone, tiered = (play(one, Looking(), SMALL_BLOCKS).requests for one in (None, tier))
    assert tiered.tier_hit_tokens is not None
    assert tiered.tier_hit_tokens.any()
    assert tiered.hit_tokens.tolist() == alone.hit_tokens.tolist()
    assert alone.hit_tokens.sum() < ample.hit_tokens.sum()
