"""The law of recovery: whatever went wrong, in the end the index says what the engine holds.

`Cache` is the prefix cache of an engine that a test drives; it tells its changes through an
`EventPublisher`, and the test may have some of that lost on the way.
"""

from collections.abc import Sequence
from typing import Any

import xxhash
from engine_stand_in import EventPublisher, removed, stored
from sidecar_run import Probe
from waiting import until, until_equal

from indexer.contract import block_hash

BLOCK = 16


def prompt(number: int, blocks: int) -> list[int]:
    """A prompt like no other."""
    return [number * 1000 + i for i in range(blocks * BLOCK)]


CHAT, OTHER, THIRD = prompt(1, 6), prompt(2, 4), prompt(3, 3)


class Cache:
    """Blocks an engine holds, by the names it gives them."""

    def __init__(self, publisher: EventPublisher, *, seed: int = 0) -> None:
        self.publisher = publisher
        self._seed = seed
        self._held: set[int] = set()
        self.prompts: list[list[int]] = []

    def _names(self, tokens: Sequence[int]) -> list[int]:
        """Contents decide them, and what the process drew at its start."""
        packed = block_hash.pack_tokens(tokens)
        ends = range(BLOCK * 4, len(packed) + 1, BLOCK * 4)
        return [xxhash.xxh3_64_intdigest(packed[:end], seed=self._seed) for end in ends]

    def depth(self, tokens: Sequence[int]) -> int:
        """Leading blocks held."""
        names = self._names(tokens)
        return next((i for i, name in enumerate(names) if name not in self._held), len(names))

    async def serve(self, tokens: list[int], **how: Any) -> int:
        """Compute a prompt: what is missing is stored. Returns the blocks hit."""
        hit, names = self.depth(tokens), self._names(tokens)
        if tokens not in self.prompts:
            self.prompts.append(tokens)
        if names[hit:]:
            parent = names[hit - 1] if hit else None
            self._held.update(names)
            await self.publisher.publish(
                stored(names[hit:], tokens[hit * BLOCK : len(names) * BLOCK], parent=parent), **how
            )
        return hit

    async def route(self, probe: Probe, tokens: list[int]) -> None:
        """Serve a prompt as routers have it served: where prediction and hit differ they tell."""
        decided_s, slot, predicted = await probe.predict(tokens)
        actual = await self.serve(tokens)
        if actual != predicted:
            await probe.tell(decided_s, slot, tokens, predicted * BLOCK, actual * BLOCK)

    async def evict(self, tokens: Sequence[int], keep: int = 0, **how: Any) -> None:
        """Drop all but the first blocks of a prompt, tails first."""
        gone = [name for name in reversed(self._names(tokens)[keep:]) if name in self._held]
        self._held.difference_update(gone)
        await self.publisher.publish(removed(gone), **how)

    def truth(self) -> list[int]:
        """Depth of every prompt ever served."""
        return [self.depth(tokens) for tokens in self.prompts]

    async def claimed(self, probe: Probe) -> list[int]:
        """What the index says of them for the one eligible instance; -1 when there is none."""
        return [await probe.eligible_depth(tokens) for tokens in self.prompts]

    async def until_exact(self, probe: Probe) -> None:
        """Wait until the index says of every prompt what is true."""
        await until_equal(self.truth(), lambda: self.claimed(probe))

    async def until_exact_by_use(self, probe: Probe) -> None:
        """Have every prompt used until the index says what is true; never does it say more."""

        async def is_exact() -> bool:
            claimed, truth = await self.claimed(probe), self.truth()
            assert all(said <= true for said, true in zip(claimed, truth, strict=True)), claimed
            for tokens in self.prompts:
                await self.route(probe, tokens)
            return claimed == truth

        await until(is_exact, "use proves what is there")

    async def claims_too_much(self, probe: Probe) -> bool:
        """Whether the index promises what is not there."""
        claimed = await self.claimed(probe)
        return any(said > true for said, true in zip(claimed, self.truth(), strict=True))


async def warmed(cache: Cache, probe: Probe) -> None:
    """Three prompts are served, and the index says so."""
    for tokens in (CHAT, OTHER, THIRD):
        await cache.serve(tokens)
        await cache.until_exact(probe)  # one by one: the ring may be short
