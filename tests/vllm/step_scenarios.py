"""Requests and the steps they arrive at, for a real engine and a simulated one."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tests.vllm.prompts import TOKEN_MAX, TOKEN_MIN
from tests.vllm.settings import BLOCK

ANSWER_ID = 77
"""The one token all answers are made of: so both engines give the same ones."""

PROMPT_TOKENS_MAX = 350


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """One request.

    Attributes:
        id: unique in its scenario.
        step: it arrives before this step, counted from 0.
        prompt: token ids.
        output_tokens: how many it generates.
        salt: its cache salt.
        abort_step: it is aborted before this step if it has not ended; None: it is not.
    """

    id: str
    step: int
    prompt: Sequence[int]
    output_tokens: int
    salt: str | None = None
    abort_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """An engine's limits and what it is asked, in the order of arrival.

    Attributes:
        capacity_blocks: so few that content is evicted.
        max_num_seqs: requests in the batch at most.
        max_num_batched_tokens: tokens computed in a step at most.
        requests: rising by step; at most one is aborted before a step.
        block_size_tokens: tokens per block.
        answer_id: token id of all answers.
    """

    capacity_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: Sequence[StepRequest]
    block_size_tokens: int = BLOCK
    answer_id: int = ANSWER_ID

    def as_json(self) -> dict[str, Any]:
        """As `step_driver.py` reads it."""
        return asdict(self)


class _Prompts:
    """Prompts that share stems, repeat and continue earlier ones, and some that do not."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self._stems = [self._ids(blocks * BLOCK) for blocks in (2, 4, 5)]
        self._asked: list[list[int]] = []

    def _ids(self, tokens: int) -> list[int]:
        drawn: list[int] = self.random.integers(TOKEN_MIN, TOKEN_MAX, tokens).tolist()
        return drawn

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            kind = self.random.integers(10)
            if kind < 2:
                prompt = self._ids(int(self.random.integers(1, 300)))
            elif kind < 4 and self._asked:
                earlier = self._asked[self.random.integers(len(self._asked))]
                prompt = [*earlier, *[ANSWER_ID] * int(self.random.integers(40))]
            else:
                stem = self._stems[self.random.integers(len(self._stems))]
                kept = int(self.random.choice([len(stem), BLOCK, 2 * BLOCK, 100]))
                beyond = int(self.random.choice([0, 0, 5, 27, BLOCK, 70, 150]))
                prompt = [*stem[:kept], *self._ids(beyond)]
            self._asked.append(prompt[:PROMPT_TOKENS_MAX])
            yield self._asked[-1]


def one_after_another(requests: int = 26) -> Scenario:
    """Each request arrives when the one before has ended; twice what the cache holds goes by."""
    prompts = _Prompts(1)
    budget, step, asked = 512, 0, []
    for number, prompt in zip(range(requests), prompts, strict=False):
        output_tokens = int(prompts.random.choice([1, 2, 5, 12, 34]))
        asked.append(
            StepRequest(id=f"r{number}", step=step, prompt=prompt, output_tokens=output_tokens)
        )
        step += output_tokens + 1
    return Scenario(
        capacity_blocks=24, max_num_seqs=4, max_num_batched_tokens=budget, requests=asked
    )


def at_once(*, capacity_blocks: int, budget: int, seed: int, requests: int = 24) -> Scenario:
    """Up to four at a time, in chunks; some have a salt, some are aborted on the way."""
    prompts = _Prompts(seed)
    random = prompts.random
    step, aborted, asked = 0, set(), []
    for number, prompt in zip(range(requests), prompts, strict=False):
        abort_step = step + int(random.integers(1, 20)) if random.random() < 0.15 else None
        if abort_step in aborted:
            abort_step = None
        aborted.add(abort_step)
        asked.append(
            StepRequest(
                id=f"r{number}",
                step=step,
                prompt=prompt,
                output_tokens=int(random.choice([1, 2, 5, 30, 60])),
                salt="tenant" if random.random() < 0.2 else None,
                abort_step=abort_step,
            )
        )
        step += int(random.choice([0, 0, 1, 2, 9]))
    return Scenario(
        capacity_blocks=capacity_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        requests=asked,
    )


SCENARIOS = {
    "one after another": one_after_another(),
    "at once": at_once(capacity_blocks=40, budget=200, seed=2),
    "at once, small chunks": at_once(capacity_blocks=24, budget=64, seed=3),
    "at once, preempted": at_once(capacity_blocks=16, budget=128, seed=21),
}
