"""llm-d's optimized baseline: sticky until saturated."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.snapshot import FleetSnapshot, RequestView, Scores

STICKY_HIT_RATIO: Final = 0.8
STICKY_DELAY_MAX_S: Final = 18.0
PREFILL_TOKENS_PER_S: Final = 15_928.0
"""llm-d's figure for Qwen3-32B on two H100, for instances whose own rate is not known."""


@dataclass(frozen=True, slots=True)
class LlmDSticky:
    """Whoever holds the prompt until it is saturated, among them the least uncached tokens.

    score = queued + new prefill tokens   [token]   of the sticky, the others behind them; of all
    when nobody is sticky or the sticky are saturated.
    Sticky: hit tokens >= 0.8 of the prompt's full blocks. Saturated: the shortest queue of a sticky
    one takes over 18 s longer to prefill than the shortest of the others.

    Source: llm-d, `guides/optimized-baseline` ("Sticky Until Saturated"): its prefix-cache-affinity
    filter and token-load scorer with their defaults, but for the 1 % of requests that ignore the
    filter to explore. No session is remembered there either: affinity is a share of the prompt.
    A queue's time is by each instance's own prefill rate where that is known.
    """

    name: str = "llm_d_sticky"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        tokens = (fleet.queued_prefill_tokens + fleet.new_prefill_tokens).astype(float)
        block = fleet.block_size_tokens
        # The last block of a prompt is computed even if it is held, so it is not asked for.
        full_tokens = (request.prompt_tokens - 1) // block * block
        sticky = (full_tokens > 0) & (fleet.hit_tokens >= STICKY_HIT_RATIO * full_tokens)
        if not sticky.any() or sticky.all():
            return tokens
        rates = np.array([r.prefill_tokens_per_s or PREFILL_TOKENS_PER_S for r in fleet.instances])
        delay_s = fleet.queued_prefill_tokens / rates
        if delay_s[sticky].min() - delay_s[~sticky].min() > STICKY_DELAY_MAX_S:
            return tokens
        return np.where(sticky, tokens, tokens + tokens.max() + 1)
