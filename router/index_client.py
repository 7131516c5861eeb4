"""The only reader of the index: fleets and instances in the background, one snapshot per request."""

from dataclasses import dataclass

import redis.asyncio

from indexer.contract.records import FleetRecord, InstanceRecord
from router.snapshot import FleetSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model name clients may ask for, and the fleet behind it."""

    fleet: FleetRecord
    adapter: str | None  # the name is a LoRA adapter's
    max_model_len_tokens: int | None  # least of the instances' limits
    model_root: str  # where tokenizer and template come from
    instances: tuple[InstanceRecord, ...]


class IndexClient:
    """Reads fleets, instances, counters and prefix hits; every call has a deadline."""

    def __init__(self, redis: redis.asyncio.Redis, *, deadline_s: float) -> None: ...

    async def run(self) -> None:
        """Keep the directory of fleets and instances fresh until cancelled. Never raises for Redis."""

    def models(self) -> dict[str, ServedModel]:
        """Every name that can be asked for now: served names, aliases, adapters. From memory."""
        ...

    async def find(self, model: str) -> ServedModel | None:
        """The model from memory, or from Redis when it is not known here yet (rate-limited)."""
        ...

    async def snapshot(self, served: ServedModel, hashes: bytes, prompt_tokens: int) -> FleetSnapshot:
        """One lookup a partition and the counters, in one round trip.

        Args:
            served: from `find`.
            hashes: chain of the prompt's block hashes, from `block_hash.chain`.
            prompt_tokens: length of the prompt.

        Returns:
            The live instances; past the deadline the last known fleet, `degraded` and without hits.

        Raises:
            IndexUnavailable: Redis did not answer in time and no earlier counters are known.
            NoEligibleInstance: no instance is alive, awake and not draining.
        """
        ...
