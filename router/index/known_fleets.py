"""Fleets as last read from Redis, and the models they serve."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from indexer.contract.limits import INSTANCE_LEASE_RENEW_S, INSTANCE_LEASE_TTL_S
from indexer.contract.records import (
    FleetCounters,
    FleetRecord,
    InstanceRecord,
    SlotFlag,
    slot_view,
)
from router import telemetry
from router.eligibility import Roster, are_eligible, ineligible_reason
from router.errors import RequestInvalid

log = structlog.get_logger()

EMPTIED_KEPT_S: Final = 2 * INSTANCE_LEASE_TTL_S
"""How long the last known fleet outlives its disappearance from Redis: sidecars join again within
seconds of a flush, and engines serve all the while."""

SILENCE_S: Final = INSTANCE_LEASE_TTL_S - 2 * INSTANCE_LEASE_RENEW_S
"""After so long between two readings a lease may have ended because nobody could renew it."""

RENEWAL_S: Final = 2.0
"""How long instances are given to renew their leases once Redis is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model name clients may ask for, and the fleet behind it."""

    name: str
    fleet: FleetRecord
    adapter: str | None  # the name is a LoRA adapter's
    max_model_len_tokens: int | None  # least of the instances' limits
    model_root: str  # where tokenizer and template come from
    roster: Roster

    @property
    def instances(self) -> tuple[InstanceRecord, ...]:
        """Who serves it, alive or not."""
        return self.roster.instances


@dataclass(slots=True)
class KnownFleet:
    """One fleet as last read."""

    record: FleetRecord
    membership: int
    instances: dict[int, InstanceRecord]
    models: dict[str, ServedModel]
    counters: FleetCounters
    read_s: float  # wall clock at which the counters were read
    emptied_s: float | None = None  # monotonic time since which Redis has held less than this
    lapsed_s: float | None = None  # and since which leases have been seen ended by an outage

    def see(self, counters: FleetCounters) -> None:
        """Take later counters of the same instances."""
        self.counters, self.read_s = counters, time.time()
        self.emptied_s = self.lapsed_s = None

    def outlasts(self, counters: FleetCounters) -> bool:
        """Whether it is still to be served from, because these counters show ended leases.

        After an outage of Redis (or a jump of its clock) every lease has ended, whoever is alive:
        sidecars could not renew. They are given RENEWAL_S to do so, or as long as a lease lasts
        where nobody has yet.
        """
        before, after = self.counters, counters
        if after.epoch != before.epoch or after.now_s - before.now_s < SILENCE_S:
            return False
        both = min(len(before.slots), len(after.slots))
        old, new = before.slots[:both], after.slots[:both]
        alive = are_eligible(old, before.now_s)
        told = new["lease_until_s"] >= after.now_s
        alive &= (new["generation"] == old["generation"]) & ~(
            told & (new["flags"] != SlotFlag.USED)
        )
        renewed = alive & told
        if int(renewed.sum()) == int(alive.sum()):
            return False
        self.lapsed_s = self.lapsed_s or time.monotonic()
        patience_s = RENEWAL_S if renewed.any() else INSTANCE_LEASE_TTL_S
        return time.monotonic() - self.lapsed_s < patience_s

    def is_current(self, counters: FleetCounters) -> bool:
        """Whether the instances are still those of these counters."""
        seen = counters.membership, counters.epoch
        return (self.membership, self.record.epoch) == seen

    def outlives(self, instances_count: int) -> bool:
        """Whether it is still to be served from, although Redis holds fewer instances of it."""
        if instances_count >= len(self.instances):
            return False
        self.emptied_s = self.emptied_s or time.monotonic()
        return time.monotonic() - self.emptied_s < EMPTIED_KEPT_S

    def completeness(self) -> dict[str, float]:
        """Label of each instance -> completeness of its part of the index, 0..1."""
        names: dict[str, float] = {}
        rows = self.counters.slots
        for slot, record in self.instances.items():
            name = telemetry.instance_label(record.instance_id)
            row = rows[slot] if slot < len(rows) else None
            # A restarted engine's slot lives beside its old one until that is swept.
            if row is not None and (row["flags"] == SlotFlag.USED or name not in names):
                names[name] = int(row["completeness_millionths"]) / 1e6
        return names

    def view(self) -> dict[str, Any]:
        """With names, for operators."""
        counters = self.counters
        instances = []
        for slot, record in sorted(self.instances.items()):
            view: dict[str, Any] = {
                "instance_id": record.instance_id,
                "slot": slot,
                "url": record.url,
                "models": record.models,
                "adapters": record.adapters or [],
                "block_size_tokens": record.block_size_tokens,
                "capacity_blocks": record.capacity_blocks,
                "max_model_len_tokens": record.max_model_len_tokens,
                "data_parallel_rank": record.data_parallel_rank,
                "engine_version": record.engine_version,
                "learned": record.learned,
                "role": record.role,
                "prefill_tokens_per_s": record.prefill_tokens_per_s,
                "tier_tokens_per_s": record.tier_tokens_per_s,
                "tier_latency_s": record.tier_latency_s,
                "tier_shared": record.tier_shared,
            }
            if slot < len(counters.slots):
                view |= slot_view(counters.slots[slot], counters.now_s)
                reason = ineligible_reason(counters.slots[slot], counters.now_s)
                view |= {"eligible": reason is None, "ineligible_reason": reason}
            else:  # its counters come with the next reading
                view |= {"eligible": False, "ineligible_reason": "joining"}
            instances.append(view)
        return {
            "fleet_id": self.record.fleet_id,
            "model_scope": self.record.model_scope,
            "block_size_tokens": self.record.block_size_tokens,
            "partitions": self.record.partitions,
            "bucket_bits": self.record.bucket_bits,
            "epoch": f"{self.record.epoch:016x}",
            "membership": self.membership,
            "instances": instances,
        }


def decode_instances(raw: dict[bytes, bytes], slots_max: int) -> dict[int, InstanceRecord]:
    """Slot -> record; those that cannot be read are counted and left out."""
    instances = {}
    for slot, packed in raw.items():
        try:
            if not 0 <= int(slot) < slots_max:
                raise ValueError(f"no slot below {slots_max}")  # noqa: TRY301
            instances[int(slot)] = _checked(InstanceRecord.decode(packed))
        except (TypeError, ValueError) as error:
            telemetry.INDEX_ERRORS.labels(call="instance_record").inc()
            log.warning("instance_record_unreadable", slot=repr(slot)[2:-1], error=str(error))
    return instances


def _checked(record: InstanceRecord) -> InstanceRecord:
    """The same; a number that is no rate (0, below, NaN, infinite) is a rate that is not known.

    Raises:
        TypeError: a field that the router relies on is of another type.
    """
    texts = (record.instance_id, record.url, record.model_root, record.role)
    names: tuple[Any, ...] = (record.models, record.adapters or [])
    ranks = (record.max_model_len_tokens, record.capacity_blocks, record.data_parallel_rank)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("instance_id, url, model_root or role is no text")
    if not all(isinstance(n, list) and all(isinstance(one, str) for one in n) for n in names):
        raise TypeError("models or adapters is no list of names")
    if not all(number is None or isinstance(number, int) for number in ranks):
        raise TypeError("a number of the record is none")
    rate: Any = record.prefill_tokens_per_s
    if rate is not None and not isinstance(rate, int | float):
        raise TypeError("prefill_tokens_per_s is no number")
    learned: Any = record.learned
    if not isinstance(learned, bool):
        raise TypeError("learned is neither true nor false")
    size: Any = record.block_size_tokens
    if not isinstance(size, int) or size < 1:
        raise TypeError("block_size_tokens is no positive number")
    if rate is not None and not 0 < rate < float("inf"):
        record = replace(record, prefill_tokens_per_s=None)
    return _with_checked_tier(record)


def _with_checked_tier(record: InstanceRecord) -> InstanceRecord:
    """Likewise: a speed or latency that is none means that there is no tier to count on."""
    tokens_per_s: Any = record.tier_tokens_per_s
    latency_s: Any = record.tier_latency_s
    shared: Any = record.tier_shared
    if not isinstance(latency_s, int | float) or not isinstance(shared, bool):
        raise TypeError("tier_latency_s is no number, or tier_shared neither true nor false")
    if tokens_per_s is None:
        return record
    if not isinstance(tokens_per_s, int | float):
        raise TypeError("tier_tokens_per_s is no number")
    if 0 < tokens_per_s < float("inf") and 0 <= latency_s < float("inf"):
        return record
    return replace(record, tier_tokens_per_s=None, tier_latency_s=0.0)


def only_model(models: Mapping[str, ServedModel]) -> ServedModel | None:
    """The model of the only fleet, for requests that name none; None when there is no fleet.

    Raises:
        RequestInvalid: there are several.
    """
    bases = {one.fleet.fleet_id: one for one in models.values() if one.adapter is None}
    if len(bases) > 1:
        names = ", ".join(sorted(one.fleet.model_scope for one in bases.values()))
        raise RequestInvalid(
            f"model: is required, because several are served here: {names}.", param="model"
        )
    base = next(iter(bases.values()), None)
    return models.get(base.fleet.model_scope, base) if base is not None else None


def served_models(
    record: FleetRecord, instances: dict[int, InstanceRecord]
) -> dict[str, ServedModel]:
    """Every name that the instances answer to: served names, aliases, adapters."""
    by_name: dict[tuple[str, str | None], dict[int, InstanceRecord]] = {}
    for slot, instance in instances.items():
        for name in instance.models:
            by_name.setdefault((name, None), {})[slot] = instance
        for adapter in instance.adapters or ():
            by_name.setdefault((adapter, adapter), {})[slot] = instance
    models = {}
    for (name, of_adapter), members in by_name.items():
        limits = [m.max_model_len_tokens for m in members.values() if m.max_model_len_tokens]
        roster = Roster.of(members)
        models[name] = ServedModel(
            name=name,
            fleet=record,
            adapter=of_adapter,
            max_model_len_tokens=min(limits, default=None),
            model_root=roster.instances[0].model_root,
            roster=roster,
        )
    return models
