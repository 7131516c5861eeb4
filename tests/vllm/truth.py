"""What the index says about one engine against what that engine says, whoever would be chosen."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.vllm.fleet import RealFleet, Worker
from tests.vllm.settings import NAME

PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """Hit tokens of one prompt on one engine: as the index has it, as the engine counts them."""

    predicted: int
    actual: int


def body(prompt: Sequence[int]) -> dict[str, object]:
    """A completion of one token."""
    return {"model": NAME, "prompt": list(prompt), "max_tokens": 1, "ignore_eos": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Asks a router for its view and an engine directly."""

    fleet: RealFleet

    async def instance_id(self, worker: Worker) -> str | None:
        """The worker's live instance; None unless there is exactly one."""
        at = worker.url.removeprefix("http://") + "/"
        ids: list[str] = [one["instance_id"] for one in await self.fleet.live_instances()]
        ids = [one for one in ids if one.startswith(at)]
        return ids[0] if len(ids) == 1 else None

    async def predicted(self, worker: Worker, prompt: Sequence[int]) -> int | None:
        """Hit tokens that a decision would credit the worker with; None: it may not be chosen."""
        instance_id = await self.instance_id(worker)
        url = f"{self.fleet.router_urls[0]}/route"
        async with self.fleet.session.post(url, json=body(prompt)) as response:
            decision = await response.json()
        for candidate in decision.get("candidates", ()):
            if candidate["instance_id"] == instance_id:
                return int(candidate["hit_tokens"])
        return None

    async def fill(self, worker: Worker, prompt: Sequence[int]) -> int:
        """Let the worker's engine compute a prompt, past all routers; its cached tokens."""
        url = f"{worker.url}/v1/completions"
        async with self.fleet.session.post(url, json=body(prompt)) as response:
            answer = await response.json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def seen(self, worker: Worker, prompt: Sequence[int]) -> Seen | None:
        """Prediction, then the engine's word; None while the worker may not be chosen."""
        predicted = await self.predicted(worker, prompt)
        if predicted is None:
            return None
        return Seen(predicted, await self.fill(worker, prompt))

    async def right_again(
        self, worker: Worker, prompts: Sequence[Sequence[int]], since_s: float, deadline_s: float
    ) -> float:
        """Seconds from `since_s` until every prompt is predicted as the engine has it.

        Blocks that an engine has and the index misses stay missed however often it is asked, so
        looking again cannot make it right. The prompts have hits in the end: after the first pass
        they are resident.

        Raises:
            AssertionError: not within the deadline.
        """
        last: list[Seen | None] = []
        while time.time() - since_s < deadline_s:
            started_s = time.time()
            last = [await self.seen(worker, prompt) for prompt in prompts]
            if all(one is not None and one.predicted == one.actual for one in last):
                again = [await self.seen(worker, prompt) for prompt in prompts]
                if all(one is not None and one.predicted == one.actual > 0 for one in again):
                    return started_s - since_s
                last = again
            await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"{worker.name} is not right after {deadline_s:g} s: {last}")
