"""What an engine can be asked to compute to show how fast it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from indexer.engine.engine_api import EngineInfo
from indexer.engine.engine_metrics import EngineSample
from indexer.engine.prefill_probe import PROBE_TOKENS, WARM_UP_TOKENS, measured_prefill


@dataclass
class Idle:
    """In place of an engine's API: answers at once, and notes the lengths of prompts."""

    lengths: list[int] = field(default_factory=list)

    async def samples(self) -> dict[str, EngineSample]:
        """It tells nothing."""
        return {}

    async def complete(self, body: Mapping[str, Any]) -> None:
        """Note it."""
        self.lengths.append(len(body["prompt"]))


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (None, [WARM_UP_TOKENS, PROBE_TOKENS, PROBE_TOKENS]),
        (1 << 17, [WARM_UP_TOKENS, PROBE_TOKENS, PROBE_TOKENS]),
        (WARM_UP_TOKENS + 8, [WARM_UP_TOKENS] * 3),
        (WARM_UP_TOKENS + 7, []),
        (4, []),
    ],
)
async def test_prompts_fit_the_model(limit: int | None, lengths: list[int]) -> None:
    """One too short to tell anything is not sent, and then nothing is known."""
    info = EngineInfo(
        models=("m",),
        model_root="m",
        adapters=(),
        max_model_len_tokens=limit,
        sources=None,
        caches={},
        version=None,
    )
    api = Idle()
    measured = await measured_prefill(cast("Any", api), info)
    assert api.lengths == lengths
    assert (measured is not None) == bool(lengths)
