"""Prefill and decode apart in the lab: who computes what, and when it is where."""

import numpy as np
import pytest

from loadgen.simulation.lab.demand import Demand, demanded
from loadgen.simulation.lab.fleet import LabFleet, LabRun
from loadgen.simulation.lab.spec import Handovers, LabSpec
from loadgen.trace_row import TraceRow
from loadgen.workloads.cache_mix import CHAT_MIX, generate_mix
from loadgen.workloads.hot_prefix import HotPrefix, generate_hot_prefix
from router.policies import POLICIES
from workers.simulated.cost_model import load_profile

SIZE = 16
HANDOVERS = Handovers(tokens_per_s=10_000.0, latency_s=0.05)
SPEC = LabSpec(instances=4, prefill_instances=2, handovers=HANDOVERS)


def played(
    demand: Demand, spec: LabSpec = SPEC, policy: str = "lmetric"
) -> tuple[LabFleet, LabRun]:
    """A fleet and its run."""
    fleet = LabFleet(spec, POLICIES[policy], demand, seed=1)
    return fleet, fleet.play()


def row(arrival_s: float, output_tokens: int) -> TraceRow:
    """A prompt of a hundred blocks, the same each time."""
    return TraceRow(
        arrival_s=arrival_s,
        prompt_tokens=100 * SIZE,
        output_tokens=output_tokens,
        block_ids=tuple(range(100)),
        block_size_tokens=SIZE,
    )


def test_a_lone_request_is_prefilled_handed_over_and_decoded() -> None:
    """Its first token: two choices, the prefill, the transfer, a step for the last block."""
    demand = demanded([row(1.0, 33)], pace="timestamps", block_size_tokens=SIZE)
    fleet, run = played(demand)
    cost, tokens = load_profile(SPEC.profile).cost, 100 * SIZE
    prefill_s = cost.step_s(
        tokens=tokens, prefill_pairs=tokens * (tokens + 1) / 2, decode_context_tokens=0
    )
    last_s = cost.step_s(
        tokens=SIZE,
        prefill_pairs=SIZE * (tokens - SIZE + (SIZE + 1) / 2),
        decode_context_tokens=0,
    )
    expected_s = 2 * SPEC.decide_s + prefill_s + HANDOVERS.transfer_s(tokens) + last_s
    assert run.requests.first_token_s[0] - 1.0 == pytest.approx(expected_s, rel=1e-9)
    assert run.requests.slot[0] >= SPEC.prefill_instances
    generated = [engine.totals.generated_tokens for engine in fleet.engines]
    assert sorted(generated) == [0, 0, 1, 33]


def test_what_the_decode_instance_holds_is_not_sent_again() -> None:
    """The second time only latency is left of the transfer; one token needs no second leg."""
    rows = [row(0.0, 33), row(30.0, 33), row(60.0, 1)]
    spec = LabSpec(instances=2, prefill_instances=1, handovers=HANDOVERS)
    _, run = played(demanded(rows, pace="timestamps", block_size_tokens=SIZE), spec)
    ttft_s = run.requests.first_token_s - run.requests.arrived_s
    assert run.requests.slot.tolist() == [1, 1, 0]
    assert run.requests.hit_tokens.tolist() == [0, 99 * SIZE, 99 * SIZE]
    assert ttft_s[0] - ttft_s[1] > 0.9 * 100 * SIZE / HANDOVERS.tokens_per_s
    assert ttft_s[2] < ttft_s[1] - HANDOVERS.latency_s


def test_a_hot_prefix_is_spread_over_the_pool_that_prefills() -> None:
    """By hits alone one of four computes it; with the detector others do, and all within the pool.

    In a fleet of eight, of which four decode and hold as much as is handed to them.
    """
    hot = HotPrefix(request_rate=40, hot_from_s=1, answer_tokens_median=20)
    rows = tuple(generate_hot_prefix(hot, requests_count=160, seed=1))
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)
    largest = {}
    for detects in (False, True):
        spec = LabSpec(instances=8, prefill_instances=4, routers=2, detects_hot_prefixes=detects)
        fleet, _ = played(demand, spec, "max_hit")
        prefilled = [engine.totals.generated_tokens for engine in fleet.engines[:4]]
        assert sum(prefilled) == len(rows)
        largest[detects] = max(prefilled)
    assert largest[False] > 0.5 * len(rows)
    assert largest[True] < 0.85 * largest[False], largest


@pytest.mark.parametrize("policy", ["lmetric", "smetric", "preble", "round_robin", "max_hit"])
@pytest.mark.parametrize("staleness_s", [0.0, 0.5])
def test_pools_keep_to_their_work_and_books_balance(policy: str, staleness_s: float) -> None:
    """Nobody decodes who prefills; `play` itself asserts that nothing stays booked."""
    rows = tuple(generate_mix(CHAT_MIX, requests_count=60, seed=3))
    demand = demanded(rows, pace="closed_loop", block_size_tokens=SIZE)
    spec = LabSpec(instances=4, prefill_instances=2, routers=2, staleness_s=staleness_s)
    fleet, run = played(demand, spec, policy)
    assert np.isfinite(run.requests.ended_s).all()
    parted = run.requests.output_tokens > 1
    assert (run.requests.slot[parted] >= 2).all()
    prefilled = sum(engine.totals.generated_tokens for engine in fleet.engines[:2])
    assert prefilled == len(rows)
