"""Who decodes a request that another instance has prefilled."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.snapshot import FleetSnapshot, RequestView, Scores

FREE_RATIO_MIN: Final = 0.01
"""A KV$ in use to the last block is as bad as one with so little left: the batch still counts."""


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """(batch size + 1) / (1 - KV$ usage): requests per free share of the KV$, this one counted.

    A step takes longer the more requests are in it and the more of the KV$ it reads; an instance
    without free blocks preempts. Equal usage: the smaller batch; equal batches: the emptier KV$.
    Neither is weighed against the other. The batch is that of the moment, by reservations; usage
    is as the engine last reported it.
    """

    name: str = "decode_leg"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:  # noqa: ARG002
        """Score every instance, in requests; lower is better."""
        free_ratio = np.maximum(1.0 - fleet.kv_usage_ratio, FREE_RATIO_MIN)
        return (fleet.batch_size + 1) / free_ratio


DECODE_LEG: Final = DecodeLeg()
