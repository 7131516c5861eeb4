"""How long prefill takes: of what waits on an instance, and of a request on top of it."""

from typing import Final

import numpy as np
import numpy.typing as npt

from router.snapshot import FleetSnapshot, RequestView

PREFILL_TOKENS_PER_S: Final = 15_928.0
"""Until prefills have been seen, where an instance's own rate is not known either: llm-d's figure
for Qwen3-32B on two H100. Attention is not counted then."""


Seconds = npt.NDArray[np.float64]


def expected_ttft_s(request: RequestView, fleet: FleetSnapshot) -> Seconds:
    """Work queued on each instance and the request's own, shape (instances,)   [s].

    n uncached tokens in a context of L take c_lin n + c_attn n (L - n / 2): each attends to all
    before it. Of the queue, L - n / 2 is the mean over what is queued. The constants are the
    fleet's fitted ones times how slow a device is; before there are any, c_lin is the inverse of
    the instance's own rate and c_attn is 0.
    """
    queued, new, cost = fleet.queued_prefill_tokens, fleet.new_prefill_tokens, fleet.prefill_cost
    if cost is None:
        rates = [one.prefill_tokens_per_s or PREFILL_TOKENS_PER_S for one in fleet.instances]
        by_rate: Seconds = (queued + new) / np.array(rates)
        return by_rate
    pairs = queued * fleet.queued_context_tokens + new * (request.prompt_tokens - new / 2)
    fastest = (queued + new) * cost.linear_s_per_token + pairs * cost.attention_s_per_pair
    seconds: Seconds = fastest if fleet.slowness is None else fastest * (fleet.slowness / 1000)
    return seconds
