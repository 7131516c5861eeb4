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
    model = load_profile(SPEC.profile).cost
    cost = PrefillCost(
        linear_s_per_token=model.linear_s_per_token,
        attention_s_per_pair=model.attention_s_per_pair,
    )
    assert list(policy.seen.values()) == [
        (0, None, cost),
        (0, None, cost),
        (1, 1600 + 33, cost),
        (2, 90 * SIZE, cost),
    ]
    assert set(policy.contexts) == {1600 - 800}  # of the first, when the second came
