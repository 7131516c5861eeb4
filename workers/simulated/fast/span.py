"""What happens between two moments at which a batch can change, and what comes out of it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.simulated.cost_model import CostModel
from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.decoders import Decoders
from workers.simulated.fast.request import ActiveChain, ChainRequest

Times = npt.NDArray[np.float64]


class ChainAdmission(NamedTuple):
    """A waiting request entered the batch.

    Attributes:
        request: which.
        hit_tokens: of its prompt, resident on the device.
        tier_hit_tokens: of its prompt, behind those, loaded from the tier.
    """

    request: ChainRequest
    hit_tokens: int
    tier_hit_tokens: int = 0


class Reached(NamedTuple):
    """A request has its first token, its last, or both."""

    request: ChainRequest
    first: bool
    last: bool


class BlockChanges(NamedTuple):
    """Blocks stored and evicted, in engine order.

    Attributes:
        at_s: when the step ended that did it; rises.
        signed: a stored block's identity, or the complement (`~`) of an evicted one's.
    """

    at_s: Times
    signed: Identities


@dataclass(slots=True, kw_only=True)
class Span:
    """One step, or a run of steps in which every request decodes.

    Attributes:
        start_s: when it began.
        ends_s: the end of each step; rises.
        steps: how many of them belong to it; an arrival may cut it.
        applied_steps: of those, how many the pool and the changes know.
        admissions: requests that entered the batch for the first time, at `start_s`.
        batch: requests whose prompt is computed, with their tokens; only in a span of one step.
        changes: of the first step, where it was scheduled on its own.
    """

    start_s: float
    ends_s: Times
    steps: int
    applied_steps: int
    admissions: list[ChainAdmission]
    batch: list[tuple[ActiveChain, int]]
    changes: list[Identities]

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return float(self.ends_s[self.steps - 1])

    def steps_until(self, now_s: float) -> int:
        """Steps that have ended by now."""
        return min(int(self.ends_s.searchsorted(now_s, side="right")), self.steps)

    def cut(self, now_s: float) -> None:
        """End with the step in progress; one that begins at this very moment is left out."""
        self.steps = min(self.steps, max(1, int(self.ends_s.searchsorted(now_s)) + 1))


def decode_ends_s(
    cost: CostModel, start_s: float, *, requests: int, context_tokens: int, steps: int
) -> Times:
    """Ends of decode steps on end, equal to the last bit to adding `step_s` up.

    Args:
        cost: step times.
        start_s: when the first step begins.
        requests: that decode, each one token longer with every step.
        context_tokens: sum of their lengths in the first step.
        steps: how many.
    """
    base_s = cost.step_s(tokens=requests, prefill_pairs=0.0, decode_context_tokens=0)
    times: Times = np.empty(steps + 1)
    times[0] = start_s
    contexts = np.arange(context_tokens, context_tokens + steps * requests, requests)
    np.multiply(contexts, cost.kv_read_s_per_token, out=times[1:])
    times[1:] += base_s
    np.add.accumulate(times, out=times)
    return times[1:]


def mixed_step_s(
    cost: CostModel, decoders: Decoders, batch: list[tuple[ActiveChain, int]]
) -> float:
    """Duration of a step in which prompts are computed, so many tokens of each, beside decoding."""
    tokens = len(decoders)
    prefill_pairs = 0.0
    decode_context_tokens = decoders.context_tokens
    for active, count in batch:
        tokens += count
        if count == 1 and active.generated_tokens:
            decode_context_tokens += active.token_count  # resumed, with its last token only
        else:
            prefill_pairs += count * (active.computed_tokens + (count + 1) / 2)
    return cost.step_s(
        tokens=tokens, prefill_pairs=prefill_pairs, decode_context_tokens=decode_context_tokens
    )
