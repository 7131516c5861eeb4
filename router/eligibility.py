"""Who may be chosen, and what is known of them. Pure."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from enum import IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from indexer.contract.identifiers import InstanceId
from indexer.contract.records import (
    COUNTERS_RECORD,
    FleetCounters,
    FleetRecord,
    InstanceRecord,
    Role,
    SlotFlag,
)
from indexer.contract.request_classes import RecentClasses
from indexer.contract.reservations import SIBLING
from router.errors import NoEligibleInstance
from router.snapshot import Column, FleetSnapshot, PrefillCost
from router.tier import TierRoster, with_tier

_ELIGIBLE_FLAGS = int(SlotFlag.USED)
"""And no other: closing, draining and asleep are not eligible."""

ALIKE_RATIO: Final = 1.25
"""Measurements of equal devices differ by less; different devices by more."""

SLOWNESS_MAX: Final = 65_535

_FLAGS: Final = list(COUNTERS_RECORD.fields or ()).index("flags")

_REASONS = (
    (SlotFlag.CLOSING, "closing"),
    (SlotFlag.DRAINING, "draining"),
    (SlotFlag.SLEEPING, "asleep"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Instances that serve one model, in columns; changes only when membership does.

    Attributes:
        instances: records, in slot order.
        identity: uint64 digest of each instance id.
        slot: slot index of each.
        block_size_tokens: each engine's own block size.
        slowness: see `FleetSnapshot`.
        abilities: likewise.
        tiers: from where they load what they lack; None: from nowhere.
    """

    instances: tuple[InstanceRecord, ...]
    identity: npt.NDArray[np.uint64]
    slot: Column
    block_size_tokens: Column
    slowness: Column | None = None
    abilities: Column | None = None
    tiers: TierRoster | None = None

    def take(self, places: npt.NDArray[np.intp]) -> "Roster":
        """These places only, in this order."""
        return Roster(
            instances=tuple([self.instances[i] for i in places.tolist()]),
            identity=self.identity[places],
            slot=self.slot[places],
            block_size_tokens=self.block_size_tokens[places],
            slowness=None if self.slowness is None else self.slowness[places],
            abilities=None if self.abilities is None else self.abilities[places],
            tiers=None if self.tiers is None else self.tiers.take(places),
        )

    @classmethod
    def of(cls, records: dict[int, InstanceRecord]) -> "Roster":
        """Build from slot index -> record."""
        slots = sorted(records)
        instances = tuple(records[slot] for slot in slots)
        return cls(
            instances=instances,
            identity=np.array(
                [xxhash.xxh3_64_intdigest(record.instance_id.encode()) for record in instances],
                np.uint64,
            ),
            slot=np.array(slots, np.int64),
            block_size_tokens=np.array([r.block_size_tokens for r in instances], np.int64),
            slowness=slowness([r.prefill_tokens_per_s for r in instances]),
            abilities=abilities([r.role for r in instances]),
            tiers=TierRoster.of(instances),
        )


def slowness(tokens_per_s: Sequence[float | None]) -> Column | None:
    """What a token of prefill takes on each device against the fastest, in thousandths.

    None where the known ones are alike within ALIKE_RATIO: then every token counts the same, and
    nothing is decided otherwise than without knowing. Who is not known counts as their median.
    """
    known = [rate for rate in tokens_per_s if rate is not None]
    if not known or max(known) <= min(known) * ALIKE_RATIO:
        return None
    middle = float(np.median(known))
    rates = np.array([middle if rate is None else rate for rate in tokens_per_s])
    thousandths = np.round(1000 * max(known) / rates).astype(np.int64)
    return np.minimum(thousandths, SLOWNESS_MAX)


class Ability(IntFlag):
    """What an instance is for."""

    PREFILL = 1
    DECODE = 2


_ABILITIES: Final = {
    "prefill": Ability.PREFILL,
    "decode": Ability.DECODE,
    "both": Ability.PREFILL | Ability.DECODE,
}
assert set(_ABILITIES) == set(Role)


def abilities(roles: Sequence[str]) -> Column | None:
    """Of instances with these roles, 0 for an unknown one; None where all are for both."""
    if all(role == Role.BOTH for role in roles):
        return None
    return np.array([_ABILITIES.get(role, 0) for role in roles], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What the index said when it was asked for one request.

    Attributes:
        fleet: what the instances share.
        roster: who serves the model.
        counters: of the whole fleet.
        depth_blocks: canonical leading blocks resident, by slot index; shape (slots,).
        tier_depth_blocks: likewise, those it has written to its tier; None: nobody asked.
        siblings: who is about to compute leading blocks of the prompt; dtype SIBLING.
        taken_s: wall clock when it was asked for these counters.
        degraded: it did not answer: the counters are the last known, the depths zero.
        degraded_cause: why.
        recent_classes: what recent requests say of the prompt's prefixes; None: nobody asked.
    """

    fleet: FleetRecord
    roster: Roster
    counters: FleetCounters
    depth_blocks: Column
    tier_depth_blocks: Column | None = None
    taken_s: float
    siblings: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, SIBLING))
    degraded: bool = False
    degraded_cause: str | None = None
    recent_classes: RecentClasses | None = None


def ineligible_reason(row: np.void, now_s: float) -> str | None:
    """Why no request goes to a slot; None when one may.

    Args:
        row: its counters.
        now_s: Redis time at which they were read.
    """
    flags = int(row["flags"])
    for flag, reason in _REASONS:
        if flags & flag:
            return reason
    if not flags & SlotFlag.USED:
        return "left"
    if flags != _ELIGIBLE_FLAGS:
        return "in a state unknown here"  # a newer sidecar says so, and means a reason
    return "lease ended" if float(row["lease_until_s"]) < now_s else None


def are_eligible(rows: npt.NDArray[np.void], now_s: float) -> npt.NDArray[np.bool_]:
    """Where `ineligible_reason` is None, for many slots at once."""
    eligible: npt.NDArray[np.bool_] = rows["flags"] == _ELIGIBLE_FLAGS
    eligible &= rows["lease_until_s"] >= now_s
    return eligible


def eligible_snapshot(
    sighting: Sighting,
    prompt_tokens: int,
    *,
    approximate: bool = False,
    prefill_cost: PrefillCost | None = None,
) -> FleetSnapshot:
    """Who may be chosen, and what is known of them.

    Eligible is an instance whose lease lived when the counters were read and that was neither
    closing, draining nor asleep. When degraded that is as long ago as the index was last heard.

    Raises:
        NoEligibleInstance: nobody is left.
    """
    assert prompt_tokens > 0, prompt_tokens
    fleet, roster, counters = sighting.fleet, sighting.roster, sighting.counters
    # Records and counters are read one after the other: the later may know more slots.
    seen = roster.slot.searchsorted(len(counters.slots))
    counts, times = counters.columns(roster.slot[:seen])
    keep = ((counts[_FLAGS] == _ELIGIBLE_FLAGS) & (times[0] >= counters.now_s)).nonzero()[0]
    if keep.size == 0:
        raise NoEligibleInstance(
            f"No instance of `{fleet.model_scope}` can take a request now: "
            f"{len(roster.instances)} known, none alive, awake and not draining. Try again later."
        )
    if keep.size < len(roster.instances):
        roster, counts, times = roster.take(keep), counts[:, keep], times[:, keep]
    generation, _, reserved, queued, _, foreign, running, waiting, kv_usage, *_ = counts
    slot, block_size_tokens = roster.slot, roster.block_size_tokens
    depth_tokens = sighting.depth_blocks[slot] * fleet.block_size_tokens
    resident_tokens = hit_tokens = _reusable(depth_tokens, block_size_tokens, prompt_tokens)
    if sighting.siblings.size:
        soon_tokens = _soon_tokens(sighting.siblings, slot, generation)
        depth_tokens = np.maximum(depth_tokens, soon_tokens)
        hit_tokens = _reusable(depth_tokens, block_size_tokens, prompt_tokens)
    snapshot = FleetSnapshot(
        fleet=fleet,
        instances=roster.instances,
        identity=roster.identity,
        slot=slot,
        generation=generation,
        block_size_tokens=block_size_tokens,
        depth_tokens=depth_tokens,
        hit_tokens=hit_tokens,
        in_flight_tokens=hit_tokens - resident_tokens,
        new_prefill_tokens=prompt_tokens - hit_tokens,
        queued_prefill_tokens=queued,
        queued_context_tokens=counters.context_tokens(slot),
        batch_size=reserved + foreign,
        running_count=running,
        waiting_count=waiting,
        kv_usage_ratio=kv_usage / 1e6,
        published_s=times[1],
        looked_s=counters.now_s,
        taken_s=sighting.taken_s,
        degraded=sighting.degraded,
        degraded_cause=sighting.degraded_cause,
        approximate=approximate,
        slowness=roster.slowness,
        abilities=roster.abilities,
        prefill_cost=prefill_cost,
    )
    if roster.tiers is None or sighting.tier_depth_blocks is None:
        return snapshot
    tier_depth_blocks = roster.tiers.depths(sighting.tier_depth_blocks[slot])
    tier_depth_tokens = tier_depth_blocks * fleet.block_size_tokens
    return with_tier(snapshot, prompt_tokens, tier_depth_tokens, roster.tiers.load)


def _reusable(depth_tokens: Column, block_size_tokens: Column, prompt_tokens: int) -> Column:
    """The last token is always computed, and an engine reuses whole blocks of its own."""
    reusable = np.minimum(depth_tokens, prompt_tokens - 1)
    return reusable - reusable % block_size_tokens


def _soon_tokens(siblings: npt.NDArray[np.void], slot: Column, generation: Column) -> Column:
    """How deep each slot will be after those that are in prefill on it."""
    soon = {(s, g): tokens for s, g, tokens in siblings.tolist()}
    return np.array(
        [soon.get(key, 0) for key in zip(slot.tolist(), generation.tolist(), strict=True)], np.int64
    )


_NO_COLUMNS = {
    *("fleet", "instances", "looked_s", "taken_s", "degraded", "degraded_cause", "approximate"),
    *("slowness", "abilities", "prefill_cost", "tier_tokens", "tier_cost_tokens"),
}
_OPTIONAL_COLUMNS = ("slowness", "abilities", "tier_tokens", "tier_cost_tokens")
_COLUMNS = tuple(field.name for field in fields(FleetSnapshot) if field.name not in _NO_COLUMNS)


def take(snapshot: FleetSnapshot, places: npt.NDArray[np.intp]) -> FleetSnapshot:
    """The snapshot of these places only, in this order."""
    return replace(
        snapshot,
        instances=tuple(snapshot.instances[i] for i in places.tolist()),
        **{name: getattr(snapshot, name)[places] for name in _COLUMNS},
        **{
            name: column[places]
            for name in _OPTIONAL_COLUMNS
            if (column := getattr(snapshot, name)) is not None
        },
    )


def without(snapshot: FleetSnapshot, excluded: AbstractSet[InstanceId]) -> FleetSnapshot:
    """The snapshot less some instances.

    Raises:
        NoEligibleInstance: nobody is left.
    """
    places = [i for i, r in enumerate(snapshot.instances) if r.instance_id not in excluded]
    if not places:
        raise NoEligibleInstance(
            f"Every instance of `{snapshot.fleet.model_scope}` was tried and failed. Try later."
        )
    return take(snapshot, np.array(places, np.intp))
