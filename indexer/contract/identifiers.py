"""Identities that must not be mixed up, as types."""

from typing import NewType

InstanceId = NewType("InstanceId", str)
"""One engine process incarnation and data-parallel rank, for example `10.0.0.7:8000/0#5f2c91d0`."""

FleetId = NewType("FleetId", str)
"""16 hex digits derived from the model scope; appears in keys, where a model name could not."""

RouterId = NewType("RouterId", str)
"""One registration of one router process; one that lost its lease registers under a new id."""

BlockHash = NewType("BlockHash", bytes)
"""8-byte canonical digest of a prefix block and everything before it."""

EngineBlockHash = NewType("EngineBlockHash", int | bytes)  # type: ignore[valid-newtype]
"""vLLM's own block hash: opaque, per engine process and group. Never leaves the sidecar."""

SlotIndex = NewType("SlotIndex", int)
"""Place of an instance in its fleet: partition * SLOTS_PER_PARTITION_MAX + local slot."""
