"""vLLM's own balancer between data-parallel engines."""

from dataclasses import dataclass

import numpy as np

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class VllmV1:
    """score = 4 x waiting + running   [request, weighted]; ignores the cache.

    Running and waiting are the engine's last report. As vLLM's client does between two reports,
    requests sent since then count as waiting: whatever the batch size exceeds the report by.
    Source: vLLM, `vllm/v1/engine/core_client.py`, `get_core_engine_for_request`.
    """

    name: str = "vllm_v1"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        del request
        unreported = np.maximum(0, fleet.batch_size - fleet.running_count - fleet.waiting_count)
        scores: Scores = 4.0 * (fleet.waiting_count + unreported) + fleet.running_count
        return scores
