"""Pure: how many requests a second a fleet of simulated engines can serve.

One engine, in virtual time, is given the requests of a workload in order with `IN_FLIGHT` of them
in it at all times, and a KV$ that never evicts. The time it is busy per request is what a request
costs at the ideal hit ratio; so many engines serve so many times one over that. It is an upper
bound: a fleet spreads its prefixes over instances and does not always have work for each.
"""

from collections.abc import Sequence

from loadgen.tokens import PromptTokens
from loadgen.trace import TraceRow
from workers.simulated.cost_model import Profile
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.request import Request, pack_tokens

IN_FLIGHT = 16
"""A batch at which decode steps are well shared and prefill is still most of the work."""


def busy_s_per_request(
    rows: Sequence[TraceRow],
    *,
    profile: Profile,
    prompts: PromptTokens,
    block_size_tokens: int,
    max_num_batched_tokens: int,
) -> float:
    """Mean busy time of one engine per request at the ideal hit ratio, in simulated seconds.

    Args:
        rows: requests with block ids, in order of arrival.
        profile: cost model of the engine.
        prompts: turns block ids into token ids.
        block_size_tokens: of the engine.
        max_num_batched_tokens: tokens the engine computes in one step.
    """
    tokens = sum(row.prompt_tokens + row.output_tokens for row in rows)
    engine = Engine(
        EngineConfig(
            cost=profile.cost,
            block_size_tokens=block_size_tokens,
            # Every request starts at most one partly filled block beside its full ones.
            capacity_blocks=tokens // block_size_tokens + 2 * len(rows),
            max_num_seqs=IN_FLIGHT,
            max_num_batched_tokens=max_num_batched_tokens,
            output_ids=(0,),
        )
    )
    waiting = iter(enumerate(rows))
    in_flight = 0
    while True:
        while in_flight < IN_FLIGHT and (next_row := next(waiting, None)) is not None:
            number, row = next_row
            token_ids = prompts.token_ids(
                row.block_ids,
                prompt_tokens=row.prompt_tokens,
                block_size_tokens=row.block_size_tokens,
            )
            engine.add(
                Request(
                    request_id=str(number),
                    packed_prompt=pack_tokens(token_ids.tolist()),
                    output_tokens=row.output_tokens,
                )
            )
            in_flight += 1
        step = engine.start_step()
        if step is None:
            return engine.totals.busy_s / len(rows)
        in_flight -= sum(token.last for token in engine.finish_step(step).tokens)
