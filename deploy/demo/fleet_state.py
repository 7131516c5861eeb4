"""What Redis and the engines say about a fleet between two measurements; making it start cold."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from deploy.demo.errors import NotColdError, NotIdleError
from indexer.contract import (
    block_hash,
    fleet_functions,
    functions,
    index_functions,
    keys,
    reservations,
)
from indexer.contract.identifiers import BlockHash
from indexer.contract.link import Link
from indexer.contract.records import FleetRecord, SlotFlag

POLL_S = 0.05
IDLE_DEADLINE_S = 30.0
COLD_DEADLINE_S = 10.0
COUNTERS = (
    "reserved_requests",
    "reserved_prefill_tokens",
    "foreign_requests",
    "running_count",
    "waiting_count",
)
FLEET_FIELDS = ("model_scope", "block_size_tokens", "partitions", "bucket_bits", "epoch")


@dataclass(slots=True, kw_only=True)
class FleetState:
    """Reads a fleet's counters and index straight from Redis.

    Attributes:
        redis: the way to it.
        session: for the engines.
        model_name: primary served model name.
        engine_urls: base URLs.
    """

    redis: Link
    session: aiohttp.ClientSession
    model_name: str
    engine_urls: Sequence[str]
    _record: FleetRecord | None = field(default=None)

    async def record(self) -> FleetRecord:
        """What the instances share."""
        if self._record is None:
            fleet = keys.fleet_id(self.model_name)
            reply = await self.redis.execute_command("HMGET", keys.fleet(fleet), *FLEET_FIELDS)
            self._record = fleet_functions.fleet_record(fleet, reply)
        return self._record

    async def nonzero_counters(self) -> dict[str, int]:
        """Sums over all instances of the counters that are not zero; empty when idle."""
        fleet = keys.fleet_id(self.model_name)
        reply = await functions.run(self.redis, reservations.read(fleet))
        counters = reservations.fleet_counters(reply)
        assert counters is not None, "a fleet with instances has counters"
        used = counters.slots[counters.slots["flags"] & SlotFlag.USED != 0]
        sums = {name: int(used[name].sum()) for name in COUNTERS}
        return {name: total for name, total in sums.items() if total}

    async def wait_idle(self) -> None:
        """Return when every counter of the fleet is exactly zero.

        Raises:
            NotIdleError: they are not after the deadline.
        """
        left: dict[str, int] = {}
        try:
            async with asyncio.timeout(IDLE_DEADLINE_S):
                while True:
                    left = await self.nonzero_counters()
                    if not left:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise NotIdleError(
                f"counters are not zero {IDLE_DEADLINE_S:g} s after the last answer: {left}"
            ) from None

    async def make_cold(self, prompts: Iterable[Sequence[int]]) -> None:
        """Empty every engine's KV$ and return when the index knows none of these prompts.

        Args:
            prompts: token ids; their first block stands for all of each.

        Raises:
            NotIdleError: requests still run, so the engines would refuse.
            NotColdError: an engine refused, or the index still credits blocks after the deadline.
        """
        await self.wait_idle()
        for url in self.engine_urls:
            async with self.session.post(f"{url}/reset_prefix_cache") as response:
                if response.status != 200:  # noqa: PLR2004 - HTTP
                    raise NotColdError(f"{url}/reset_prefix_cache answered {response.status}")
            # An engine announces a reset with its next batch of events; this prompt is too short to
            # leave a block behind.
            body = {"model": self.model_name, "prompt": [0], "max_tokens": 1}
            async with self.session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                await response.read()
        await self.wait_idle()
        blocks = await self._first_blocks(prompts)
        known = 0
        try:
            async with asyncio.timeout(COLD_DEADLINE_S):
                while True:
                    known = await self._known_count(blocks)
                    if known == 0:
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise NotColdError(
                f"the index still credits {known} first blocks after a reset of all engines"
            ) from None

    async def _first_blocks(self, prompts: Iterable[Sequence[int]]) -> set[BlockHash]:
        record = await self.record()
        size = record.block_size_tokens
        root = block_hash.root(model_scope=record.model_scope, block_size_tokens=size)
        starts = {tuple(prompt[:size]) for prompt in prompts if len(prompt) >= size}
        return {block_hash.step(root, block_hash.pack_tokens(start)) for start in starts}

    async def _known_count(self, blocks: Iterable[BlockHash]) -> int:
        """How many of these blocks, each the first of a chain, any instance holds."""
        record = await self.record()
        calls = [
            index_functions.lookup(record, partition, block)
            for partition in range(record.partitions)
            for block in blocks
        ]
        return sum(bool(reply) for reply in await functions.run_all(self.redis, calls))
