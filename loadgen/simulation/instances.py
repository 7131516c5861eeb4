"""The engines of a virtual fleet, and their records. Pure."""

from indexer.contract import keys
from indexer.contract.identifiers import InstanceId
from indexer.contract.records import FleetRecord, InstanceRecord, Role
from loadgen.simulation.workload import OUTPUT_IDS
from router.eligibility import Roster
from router.snapshot import PrefillCost
from workers.simulated.cost_model import load_profile
from workers.simulated.engine import Engine, EngineConfig

BLOCK_SIZE_TOKENS = 16
"""Of the engines, and canonical."""


def make_engine(name: str, *, max_num_seqs: int, max_num_batched_tokens: int) -> Engine:
    """An empty engine of a shipped profile."""
    return Engine(
        make_engine_config(
            name, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
    )


def make_engine_config(
    name: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    capacity_blocks: int | None = None,
) -> EngineConfig:
    """An engine of a shipped profile; its blocks are the profile's unless given."""
    profile = load_profile(name)
    return EngineConfig(
        cost=profile.cost,
        block_size_tokens=BLOCK_SIZE_TOKENS,
        capacity_blocks=capacity_blocks or profile.capacity_tokens // BLOCK_SIZE_TOKENS,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        output_ids=OUTPUT_IDS,
    )


def make_prefill_cost(engine: EngineConfig) -> PrefillCost:
    """What routers of a live fleet fit from first bytes, here as the engine's model has it."""
    return PrefillCost(
        linear_s_per_token=engine.cost.linear_s_per_token,
        attention_s_per_pair=engine.cost.attention_s_per_pair,
    )


def make_membership(
    count: int, engine: EngineConfig, *, prefill_count: int = 0
) -> tuple[FleetRecord, Roster]:
    """A fleet of equal instances as routers know it.

    Args:
        count: instances.
        engine: of each.
        prefill_count: the first so many only prefill and the others only decode; 0: all do both.
    """
    fleet = FleetRecord(
        fleet_id=keys.fleet_id("m"),
        model_scope="m",
        block_size_tokens=BLOCK_SIZE_TOKENS,
        partitions=1,
        bucket_bits=10,
        epoch=1,
    )
    records = {
        slot: InstanceRecord(
            instance_id=InstanceId(f"engine-{slot}"),
            url=f"http://engine-{slot}",
            models=["m"],
            model_root="m",
            block_size_tokens=BLOCK_SIZE_TOKENS,
            capacity_blocks=engine.capacity_blocks,
            role=_role(slot, prefill_count),
        )
        for slot in range(count)
    }
    return fleet, Roster.of(records)


def _role(slot: int, prefill_count: int) -> Role:
    if prefill_count == 0:
        return Role.BOTH
    return Role.PREFILL if slot < prefill_count else Role.DECODE
