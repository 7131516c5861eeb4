"""What the engine charges for a step."""

from dataclasses import replace

import pytest

from workers.simulated.cost_model import CostModel
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.request import Request, pack_tokens

NOTHING = CostModel(
    step_overhead_s=0.0,
    linear_s_per_token=0.0,
    weights_s=0.0,
    experts_s=0.0,
    expert_share=0.0,
    attention_s_per_pair=0.0,
    kv_read_s_per_token=0.0,
)


def durations(cost: CostModel, *, prompt_tokens: int, output_tokens: int) -> list[float]:
    """Durations of the steps of one request, in chunks of 8 tokens."""
    engine = Engine(
        EngineConfig(
            cost=cost,
            block_size_tokens=4,
            capacity_blocks=64,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            output_ids=range(10),
        )
    )
    packed = pack_tokens(range(prompt_tokens))
    engine.add(Request(request_id="r", packed_prompt=packed, output_tokens=output_tokens))
    steps = []
    while (step := engine.start_step()) is not None:
        steps.append(step.duration_s)
        engine.finish_step(step)
    return steps


def test_chunks_charge_each_query_key_pair_once() -> None:
    """A prompt of n tokens has n (n + 1) / 2 pairs, however it is cut."""
    steps = durations(replace(NOTHING, attention_s_per_pair=1.0), prompt_tokens=20, output_tokens=1)
    assert (len(steps), sum(steps)) == (3, 20 * 21 / 2)


def test_decode_reads_its_context() -> None:
    """Each decode step reads the KV$ of all tokens so far."""
    cost = replace(NOTHING, kv_read_s_per_token=1.0)
    assert durations(cost, prompt_tokens=8, output_tokens=4) == [0.0, 9.0, 10.0, 11.0]


def test_linear_layers_are_charged_per_computed_token() -> None:
    """Prefill chunks charge their tokens, a decode step one."""
    cost = replace(NOTHING, linear_s_per_token=1.0)
    assert durations(cost, prompt_tokens=12, output_tokens=2) == pytest.approx([8.0, 4.0, 1.0])
