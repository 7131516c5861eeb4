"""The policy lab's fleet: what is asked is answered, in order, and nothing stays booked."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from loadgen.simulation.instances import make_engine_config
from loadgen.simulation.lab.demand import Demand, demanded
from loadgen.simulation.lab.fleet import LOST, LabFleet, LabRun
from loadgen.simulation.lab.spec import LabSpec
from loadgen.trace_row import TraceRow
from loadgen.workloads.cache_mix import CHAT_MIX, generate_mix
from loadgen.workloads.hot_prefix import QUIET, SUDDEN, HotPrefix, generate_hot_prefix
from router.policies import POLICIES
from router.snapshot import FleetSnapshot, RequestView, Scores
from workers.simulated.cost_model import load_profile

SIZE = 16
SPEC = LabSpec(instances=2)


def played(demand: Demand, spec: LabSpec = SPEC, policy: str = "lmetric", seed: int = 1) -> LabRun:
    """A run of a small fleet."""
    return LabFleet(spec, POLICIES[policy], demand, seed=seed).play()


def row(blocks: range, arrival_s: float, **fields: object) -> TraceRow:
    """A prompt of whole blocks."""
    values: dict[str, object] = {"output_tokens": 33, **fields}
    return TraceRow(
        arrival_s=arrival_s,
        prompt_tokens=len(blocks) * SIZE,
        block_ids=tuple(blocks),
        block_size_tokens=SIZE,
        **values,  # type: ignore[arg-type]
    )


def mix(count: int, seed: int = 3) -> Demand:
    """Chat with reuse."""
    rows = tuple(generate_mix(CHAT_MIX, requests_count=count, seed=seed))
    return demanded(rows, pace="closed_loop", block_size_tokens=SIZE)


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    """TTFT is the way to the decision and one step of prefill."""
    demand = demanded([row(range(100), 1.0)], pace="timestamps", block_size_tokens=SIZE)
    run = played(demand)
    cost = load_profile(SPEC.profile).cost
    tokens = 100 * SIZE
    step_s = cost.step_s(
        tokens=tokens, prefill_pairs=tokens * (tokens + 1) / 2, decode_context_tokens=0
    )
    assert run.requests.arrived_s.tolist() == [1.0]
    assert run.requests.first_token_s[0] - 1.0 == pytest.approx(SPEC.decide_s + step_s, rel=1e-12)


def test_a_follow_up_waits_for_its_answer_and_finds_it() -> None:
    """It is sent a think time after the answer's end, to who holds prompt and answer, and hits."""
    first = row(range(100), 0.0, session_id="a")
    second = row(range(120), 50.0, session_id="a", think_s=2.5)
    other = row(range(1000, 1010), 0.1, session_id="b", output_tokens=400)
    run = played(demanded([first, other, second], pace="closed_loop", block_size_tokens=SIZE))
    requests = run.requests
    assert requests.arrived_s[2] == pytest.approx(requests.ended_s[0] + 2.5)
    assert requests.slot[2] == requests.slot[0]
    # The last token of the answer was never computed; whole blocks of the rest are resident.
    assert requests.hit_tokens[2] == (100 * SIZE + 33 - 1) // SIZE * SIZE


def test_equal_arguments_give_equal_runs_and_others_do_not() -> None:
    """Also with several routers that draw, remember and know late."""
    demand = mix(150)
    spec = LabSpec(instances=4, routers=3, staleness_s=0.25)
    one, again, other = (played(demand, spec, "preble", seed) for seed in (1, 1, 2))
    assert np.array_equal(one.requests.ended_s, again.requests.ended_s)
    assert np.array_equal(one.requests.slot, again.requests.slot)
    assert not np.array_equal(one.requests.slot, other.requests.slot)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_everything(policy: str) -> None:
    """All requests end, on instances there are; `play` itself asserts that nothing stays booked."""
    demand = mix(40)
    for spec in (LabSpec(instances=3), LabSpec(instances=3, routers=2, staleness_s=0.5)):
        run = played(demand, spec, policy)
        assert np.isfinite(run.requests.ended_s).all()
        assert set(run.requests.slot.tolist()) <= {0, 1, 2}
        assert (run.requests.first_token_s > run.requests.arrived_s).all()


def test_what_no_engine_can_hold_is_lost_and_the_session_goes_on() -> None:
    """An engine refuses it; the follow-up is sent all the same."""
    capacity = make_engine_config(
        SPEC.profile, max_num_seqs=256, max_num_batched_tokens=8192
    ).capacity_blocks
    rows = [
        row(range(capacity + 1), 0.0, session_id="a"),
        row(range(10**7, 10**7 + 5), 1.0, session_id="a", think_s=1.0),
    ]
    run = played(demanded(rows, pace="closed_loop", block_size_tokens=SIZE))
    assert run.requests.slot[0] == LOST
    assert np.isnan(run.requests.ended_s[0])
    assert np.isfinite(run.requests.ended_s[1])


def test_routers_that_know_late_pile_up() -> None:
    """A burst of equal prompts through four routers: fair when they share, piled when they lag."""
    hot = HotPrefix(request_rate=400.0, hot_ratio=0.0, cold_prefixes_count=1)
    rows = tuple(generate_hot_prefix(hot, requests_count=160, seed=1))
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)

    def largest(staleness_s: float) -> int:
        spec = LabSpec(instances=4, routers=4, staleness_s=staleness_s)
        return int(np.bincount(played(demand, spec, "least_loaded").requests.slot).max())

    assert largest(0.0) == 40
    assert largest(5.0) > 40


def test_reports_matter_to_who_goes_by_them() -> None:
    """Reservations tell at once what engines report late; vllm_v1 goes by the reports."""
    demand = mix(120)
    seldom = replace(SPEC, routers=2, report_interval_s=5.0)
    often = replace(seldom, report_interval_s=0.01)

    def slots(spec: LabSpec, policy: str) -> list[int]:
        chosen: list[int] = played(demand, spec, policy).requests.slot.tolist()
        return chosen

    assert slots(often, "lmetric") == slots(seldom, "lmetric")
    assert slots(often, "vllm_v1") != slots(seldom, "vllm_v1")


@dataclass
class Counting:
    """Round robin that notes the sequence numbers it is asked with."""

    name: str = "counting"
    seen: list[int] = field(default_factory=list)

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        self.seen.append(request.sequence)
        return POLICIES["round_robin"](request, fleet)


@pytest.mark.parametrize("routers", [1, 3])
def test_each_router_numbers_its_own_requests_as_they_come(routers: int) -> None:
    """So several go round by themselves, as real ones do; in closed loop the row says nothing."""
    policy = Counting()
    spec = LabSpec(instances=2, routers=routers, staleness_s=0.1)
    LabFleet(spec, policy, mix(60), seed=1).play()
    assert policy.seen.count(0) == routers
    counts = [policy.seen.count(number) for number in range(60)]
    assert counts == sorted(counts, reverse=True)
    assert routers > 1 or policy.seen == list(range(60))


def test_busy_time_and_reports_cover_the_run() -> None:
    """Busy time never falls, is not above the time passed, and someone was busy."""
    run = played(mix(80))
    assert (np.diff(run.busy.at_s) > 0).all()
    assert (np.diff(run.busy.busy_s, axis=0) >= 0).all()
    assert (run.busy.busy_s[-1] <= run.busy.at_s[-1]).all()
    assert run.busy.busy_s[-1].max() > 0


def test_a_prefix_that_its_holder_can_bear_is_let_alone() -> None:
    """4 % of the requests, by hits alone: the detector changes nothing, to the last bit."""
    rows = tuple(generate_hot_prefix(replace(QUIET, request_rate=60), requests_count=300, seed=1))
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)
    without, with_ = (
        played(demand, LabSpec(instances=6, routers=3, detects_hot_prefixes=one), "max_hit")
        for one in (False, True)
    )
    assert np.array_equal(without.requests.slot, with_.requests.slot)
    assert np.array_equal(without.requests.ended_s, with_.requests.ended_s)


def test_a_hot_prefix_comes_to_be_held_by_as_many_as_it_needs() -> None:
    """By hits alone one holder serves 60 % of the requests; three routers agree to spread them.

    Those who come first wait for new holders, so the last half of the requests is measured.
    """
    rows = tuple(
        generate_hot_prefix(
            HotPrefix(request_rate=60, hot_from_s=1, answer_tokens_median=20),
            requests_count=300,
            seed=1,
        )
    )
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)
    hot = np.array([row.category == "hot" for row in rows])
    mean_s, holders = {}, {}
    for detects in (False, True):
        spec = LabSpec(instances=4, routers=3, detects_hot_prefixes=detects)
        run = played(demand, spec, "max_hit").requests
        late = hot & (np.arange(len(rows)) >= len(rows) // 2)
        mean_s[detects] = float((run.first_token_s - run.arrived_s)[late].mean())
        holders[detects] = len(set(run.slot[hot].tolist()))
    assert holders[False] == 1
    assert holders[True] >= 2
    assert mean_s[True] < mean_s[False] / 2, mean_s


def test_a_long_prefix_that_is_suddenly_hot_misleads_the_product_too() -> None:
    """One of 16 holds 32,768 tokens that 60 % then ask for; with the detector more come to hold it.

    Hits outweigh the batch of the holders, each step of which reads the prefix for each request.
    """
    rows = tuple(generate_hot_prefix(SUDDEN, requests_count=560, seed=1))
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)
    late = np.array([row.arrival_s >= SUDDEN.hot_from_s for row in rows])
    ttft_s, busiest = {}, {}
    for detects in (False, True):
        run = played(
            demand, LabSpec(instances=16, routers=2, detects_hot_prefixes=detects)
        ).requests
        ttft_s[detects] = float((run.first_token_s - run.arrived_s)[late].mean())
        busiest[detects] = int(np.bincount(run.slot[late]).max())
    assert ttft_s[True] < 0.9 * ttft_s[False], ttft_s
    assert busiest[True] < busiest[False], busiest
