"""Builders with explicit defaults; a test names only what it is about."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from indexer.contract import fleet_functions, keys
from indexer.contract.call import Call
from indexer.contract.identifiers import BlockHash, InstanceId, SlotIndex
from indexer.contract.records import (
    EngineCounters,
    FleetRecord,
    IndexCounters,
    InstanceRecord,
    SlotFlag,
)
from router.snapshot import FleetSnapshot, RequestView


def make_fleet_record(**changes: Any) -> FleetRecord:
    """One partition, 16-token blocks."""
    fleet = FleetRecord(
        fleet_id=keys.fleet_id("m"),
        model_scope="m",
        block_size_tokens=16,
        partitions=1,
        bucket_bits=6,
        epoch=7,
    )
    return replace(fleet, **changes)


def make_instance(name: str = "a", **changes: Any) -> InstanceRecord:
    """An instance of model m with 16-token blocks."""
    instance = InstanceRecord(
        instance_id=InstanceId(name),
        url=f"http://{name}:8000",
        models=["m"],
        model_root="m",
        block_size_tokens=16,
        max_model_len_tokens=4096,
    )
    return replace(instance, **changes)


def make_request(prompt_tokens: int = 100, **changes: Any) -> RequestView:
    """A first turn."""
    request = RequestView(request_id="r", sequence=0, prompt_tokens=prompt_tokens)
    return replace(request, **changes)


def make_snapshot(
    prompt_tokens: int = 100,
    *,
    hit_tokens: list[int],
    queued_prefill_tokens: list[int] | None = None,
    queued_context_tokens: list[int] | None = None,
    batch_size: list[int] | None = None,
    running_count: list[int] | None = None,
    waiting_count: list[int] | None = None,
    names: list[str] | None = None,
) -> FleetSnapshot:
    """One instance per element of hit_tokens; idle unless said otherwise."""
    count = len(hit_tokens)
    names = names or [chr(ord("a") + i) for i in range(count)]
    instances = tuple(make_instance(name) for name in names)

    def column(values: list[int] | None) -> np.ndarray:
        return np.array(values or [0] * count, np.int64)

    return FleetSnapshot(
        fleet=make_fleet_record(),
        instances=instances,
        identity=np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64),
        slot=np.arange(count, dtype=np.int64),
        generation=np.ones(count, np.int64),
        block_size_tokens=np.full(count, 16, np.int64),
        depth_tokens=column(hit_tokens),
        hit_tokens=column(hit_tokens),
        in_flight_tokens=column(None),
        new_prefill_tokens=prompt_tokens - column(hit_tokens),
        queued_prefill_tokens=column(queued_prefill_tokens),
        queued_context_tokens=column(queued_context_tokens),
        batch_size=column(batch_size),
        running_count=column(running_count),
        waiting_count=column(waiting_count),
        kv_usage_ratio=np.zeros(count),
        published_s=np.ones(count),
        looked_s=1.0,
        taken_s=0.0,
    )


def make_heartbeat(
    fleet: FleetRecord,
    slot: SlotIndex,
    generation: int,
    *,
    index: IndexCounters | None = None,
    counters: EngineCounters | None,
    stored: Sequence[BlockHash] = (),
    known_s: float | None = None,
) -> Call:
    """A heartbeat of an instance that is awake; of nothing known, unless told."""
    index = index or IndexCounters(blocks=0, completeness_ratio=0.0)
    return fleet_functions.heartbeat(
        fleet,
        slot,
        generation,
        state=SlotFlag(0),
        index=index,
        counters=counters,
        stored=stored,
        known_s=known_s,
    )
