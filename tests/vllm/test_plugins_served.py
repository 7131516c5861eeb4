"""The step statistics plugin in the engine that has it, behind a sidecar and routers."""

import pytest
from waiting import until

from tests.vllm.asking import Asker
from tests.vllm.fleet import RealFleet
from tests.vllm.prompts import Prompts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60, func_only=True),
]


async def test_steps_are_heard(fleet: RealFleet, asker: Asker) -> None:
    """Each step of the engine reaches its sidecar as one readable message."""
    worker = fleet.workers["b"]
    before = await fleet.metric(worker, "steps_total")
    prompts = Prompts(71)

    async def is_heard() -> bool:
        await asker.complete(prompts.blocks(2))
        return await fleet.metric(worker, "steps_total") > before

    await until(is_heard, "steps are heard")
    assert await fleet.metric(worker, "steps_malformed_total") == 0
