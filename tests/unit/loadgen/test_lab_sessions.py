"""What session-centric policies see in the policy lab is what they see in a router."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from loadgen.simulation.lab.demand import demanded
from loadgen.simulation.lab.fleet import LabFleet
from loadgen.simulation.lab.spec import LabSpec
from loadgen.trace_row import TraceRow
from router.policies.smetric import SMetric
from router.snapshot import FleetSnapshot, PrefillCost, RequestView, Scores
from workers.simulated.cost_model import load_profile

SIZE = 16
SPEC = LabSpec(instances=2)


@dataclass
class Watched:
    """SMetric, and what it is shown.

    Attributes:
        seen: turn, history, cost of prefill of each request, once.
        contexts: all that was queued somewhere when a request came.
    """

    name: str = "watched"
    seen: dict[str, tuple[int, int | None, PrefillCost | None]] = field(default_factory=dict)
    contexts: list[int] = field(default_factory=list)

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """As SMetric."""
        shown = (request.turn, request.history_tokens, fleet.prefill_cost)
        self.seen[request.request_id] = shown
        queued = fleet.queued_prefill_tokens > 0
        self.contexts += np.unique(fleet.queued_context_tokens[queued]).tolist()
        return SMetric()(request, fleet)


def row(blocks: range, arrival_s: float, session: str) -> TraceRow:
    """A prompt of whole blocks; its answer has 33 tokens."""
    return TraceRow(
        arrival_s=arrival_s,
        prompt_tokens=len(blocks) * SIZE,
        output_tokens=33,
        block_ids=tuple(blocks),
        block_size_tokens=SIZE,
        session_id=session,
    )


@pytest.mark.parametrize("staleness_s", [0.0, 0.25])
def test_a_session_policy_sees_turns_history_costs_and_contexts(staleness_s: float) -> None:
    """History is the parent and its answer, at most the prompt; a queue's context is its mean."""
    rows = [
        row(range(100), 0.0, "a"),
        row(range(1000, 1200), 0.0005, "b"),
        row(range(120), 50.0, "a"),
        row(range(90), 100.0, "a"),  # compacted
    ]
    policy = Watched()
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)
    LabFleet(replace(SPEC, staleness_s=staleness_s), policy, demand, seed=1).play()
    assert list(policy.seen.values()) == [
        (0, None, None),
        (0, None, None),
        (1, 1600 + 33, None),
        (2, 90 * SIZE, None),
    ]
    assert set(policy.contexts) == {1600 - 800}  # of the first, when the second came


@pytest.mark.parametrize("prefill_instances", [0, 1])
def test_what_prefill_costs_is_fitted_as_in_a_router(prefill_instances: int) -> None:
    """Unknown for 32 prefills of one router, then near the engines' own constants; each by itself.

    Also where prefill is apart: there the decode legs say nothing of it.
    """
    blocks, rows = 1, []
    for number in range(120):
        length = 50 + 37 * (number % 23) ** 2 // 10
        rows.append(row(range(blocks, blocks + length), 5.0 * number, f"s{number}"))
        blocks += length
    policy = Watched()
    demand = demanded(rows, pace="timestamps", block_size_tokens=SIZE)
    spec = replace(SPEC, routers=2, prefill_instances=prefill_instances)
    LabFleet(spec, policy, demand, seed=1).play()
    costs = [cost for _, _, cost in policy.seen.values()]
    known = [cost for cost in costs if cost is not None]
    assert 2 * 32 <= len(costs) - len(known) < 100
    assert len(set(known)) >= 2
    model = load_profile(SPEC.profile).cost
    for cost in known:
        assert cost.linear_s_per_token == pytest.approx(model.linear_s_per_token, rel=0.05)
        assert cost.attention_s_per_pair == pytest.approx(model.attention_s_per_pair, rel=0.05)
