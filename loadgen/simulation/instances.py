"""The engines of a virtual fleet, and their records. Pure."""

from indexer.contract import keys
from indexer.contract.identifiers import InstanceId
from indexer.contract.records import FleetRecord, InstanceRecord
from loadgen.simulation.workload import OUTPUT_IDS
from router.eligibility import Roster
from workers.simulated.cost_model import load_profile
from workers.simulated.engine import Engine, EngineConfig

BLOCK_SIZE_TOKENS = 16
"""Of the engines, and canonical."""


def make_engine(name: str, *, max_num_seqs: int, max_num_batched_tokens: int) -> Engine:
    """An empty engine of a shipped profile."""
    profile = load_profile(name)
    return Engine(
        EngineConfig(
            cost=profile.cost,
            block_size_tokens=BLOCK_SIZE_TOKENS,
            capacity_blocks=profile.capacity_tokens // BLOCK_SIZE_TOKENS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            output_ids=OUTPUT_IDS,
        )
    )


def make_membership(count: int, engine: EngineConfig) -> tuple[FleetRecord, Roster]:
    """A fleet of equal instances as routers know it."""
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
        )
        for slot in range(count)
    }
    return fleet, Roster.of(records)
