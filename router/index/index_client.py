"""The router's only reader of the index: fleets in the background, one snapshot per request."""

import asyncio
import contextlib
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog

from indexer.contract import fleet_functions, functions, index_functions, keys, reservations
from indexer.contract.call import Call as FunctionCall
from indexer.contract.fleet_functions import Unreadable, reading
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.limits import BLOCK_HASH_BYTES, SLOTS_PER_PARTITION_MAX
from indexer.contract.link import Link
from indexer.contract.milestones import Milestones
from indexer.contract.records import FleetCounters, FleetRecord
from indexer.contract.request_classes import ClassPrefixes, RecentClasses
from router import telemetry
from router.eligibility import Sighting
from router.errors import DegradedCause, IndexUnavailable
from router.index.known_fleets import KnownFleet, ServedModel, decode_instances, served_models
from router.index.redis_guard import Call, RedisGuard
from router.snapshot import Column

log = structlog.get_logger()

REFRESH_S: Final = 0.5
"""How often the directory of fleets is read; a known fleet's changes are noticed at once."""

FIND_MISS_S: Final = 0.25
"""Least time between two extra directory reads for names nobody serves."""

NO_BLOCK: Final = bytes(BLOCK_HASH_BYTES)
"""A hash to look up when nothing is to be found."""

INDEX_SILENCE_MAX_S: Final = 5.0
"""After so long without an answer of Redis, an unknown model may be a known one unheard of."""


class IndexClient:
    """Reads fleets, instances, counters and prefix hits; every call has a deadline.

    Args:
        link: to Redis.
        deadline_s: for one call.
        guard: shared with whoever else calls Redis for requests; None: one of its own.
    """

    def __init__(self, link: Link, *, deadline_s: float, guard: RedisGuard | None = None) -> None:
        self._link = link
        self._deadline_s = deadline_s
        self._guard = guard or RedisGuard(deadline_s=deadline_s)
        self._fleets: dict[FleetId, KnownFleet] = {}
        self._models: dict[str, ServedModel] = {}
        self._unreadable: dict[bytes, str] = {}  # member of the directory -> what is wrong
        self._refreshing = asyncio.Lock()
        self._heard_s = -np.inf
        self._missed_s = -np.inf

    # -- fleets and instances ---------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the directory of fleets and instances fresh, and probe, until cancelled."""
        with self._guard.watched():
            while True:
                begun_s = time.monotonic()
                try:
                    await self.refresh()
                    if self._guard.is_open:
                        await self._probe()
                except REDIS_WEATHER as error:
                    self._guard.probed(begun_s, error)
                else:
                    self._guard.probed(begun_s, None)
                await self._guard.until_probe(REFRESH_S)

    async def _probe(self) -> None:
        """Ask as for a request: of a cluster the partitions' servers have to answer, too.

        Raises:
            RedisError, OSError, TimeoutError: Redis is gone or slow.
        """
        for known in list(self._fleets.values()):
            fleet = known.record
            with contextlib.suppress(Unreadable):
                async with asyncio.timeout(self._deadline_s):
                    read = reservations.read(fleet.fleet_id)
                    await self._ask(fleet, NO_BLOCK, read, _no_depth(fleet))

    async def refresh(self) -> None:
        """Read the directory, and every fleet whose membership changed.

        Raises:
            RedisError, OSError, TimeoutError: Redis is gone or slow.
        """
        async with asyncio.timeout(self._deadline_s):
            members = await self._link.execute_command("SMEMBERS", keys.directory())
        found = []
        for member in members:
            try:
                with reading():
                    fleet = fleet_functions.fleet_id(member)
                found.append(fleet)
                await self._refresh_fleet(fleet, None)
            except Unreadable as error:  # the others are served, this one as last known
                self._note_unreadable(member, error)
            else:
                self._unreadable.pop(member, None)
        for member in set(self._unreadable) - set(members):
            del self._unreadable[member]
        for fleet in set(self._fleets) - set(found):
            self._drop(fleet)
        self._rebuild_models()
        self._heard_s = time.monotonic()

    def _note_unreadable(self, member: bytes, error: Unreadable) -> None:
        telemetry.INDEX_ERRORS.labels(call="fleet_record").inc()
        if self._unreadable.get(member) != str(error):
            log.warning("fleet_unreadable", fleet_id=repr(member)[2:-1], error=str(error))
        self._unreadable[member] = str(error)

    async def _refresh_fleet(self, fleet: FleetId, seen: FleetCounters | None) -> None:
        """Read record and instances of a fleet if its membership is not the known one.

        Raises:
            Unreadable: what Redis holds of it cannot be decoded.
            RedisError, OSError, TimeoutError: Redis is gone or slow.
        """
        with reading():
            await self._read_fleet(fleet, seen)

    async def _read_fleet(self, fleet: FleetId, seen: FleetCounters | None) -> None:
        async with asyncio.timeout(self._deadline_s):
            counters = seen or reservations.fleet_counters(
                await functions.run(self._link, reservations.read(fleet))
            )
            known = self._fleets.get(fleet)
            if counters is None:
                self._drop(fleet)
                return
            if known and known.outlasts(counters):
                return
            if known and known.is_current(counters):
                known.see(counters)
                return
            shape, raw = await self._link.execute(
                [
                    ("HMGET", keys.fleet(fleet), *fleet_functions.FLEET_FIELDS),
                    ("HGETALL", keys.instances(fleet)),
                ]
            )
        if None in shape:
            self._drop(fleet)
            return
        record = fleet_functions.fleet_record(fleet, shape)
        slots_max = record.partitions * SLOTS_PER_PARTITION_MAX
        instances = decode_instances(dict(zip(raw[::2], raw[1::2], strict=True)), slots_max)
        if known and known.record.epoch != record.epoch and known.outlives(len(instances)):
            return
        self._fleets[fleet] = KnownFleet(
            record=record,
            membership=counters.membership,
            instances=instances,
            models=served_models(record, instances),
            counters=counters,
            read_s=time.time(),
        )
        log.info("fleet_changed", model_scope=record.model_scope, instances=len(instances))

    def _drop(self, fleet: FleetId) -> None:
        known = self._fleets.get(fleet)
        if known is not None and not known.outlives(0):
            del self._fleets[fleet]

    def _rebuild_models(self) -> None:
        # A name served by two fleets goes to the fleet of that scope; else to the first by scope.
        models: dict[str, ServedModel] = {}
        for fleet in sorted(self._fleets.values(), key=lambda f: f.record.model_scope):
            for name, served in fleet.models.items():
                if name not in models or name == fleet.record.model_scope:
                    models[name] = served
        self._models = models

    def models(self) -> dict[str, ServedModel]:
        """Every name that can be asked for: served names, aliases, adapters. From memory."""
        return self._models

    def instance_ids(self) -> set[InstanceId]:
        """Every member of every fleet, alive or not. From memory."""
        return {
            one.instance_id for known in self._fleets.values() for one in known.instances.values()
        }

    def is_scope(self, model: str) -> bool:
        """Whether a fleet of this model exists, with instances or without."""
        return any(fleet.record.model_scope == model for fleet in self._fleets.values())

    async def find(self, model: str) -> ServedModel | None:
        """The model from memory, or from Redis when it is not known here yet (rate-limited).

        Raises:
            IndexUnavailable: its fleet is there, but cannot be read.
        """
        served = self._models.get(model)
        due = time.monotonic() - self._missed_s > FIND_MISS_S
        if served is None and due and not self._guard.is_open:
            self._missed_s = time.monotonic()
            try:
                await self.refresh()
            except REDIS_WEATHER:
                telemetry.INDEX_ERRORS.labels(call="find").inc()
            served = self._models.get(model)
        if served is None and keys.fleet_id(model).encode() in self._unreadable:
            raise IndexUnavailable(f"What Redis holds of the fleet of `{model}` cannot be read.")
        return served

    # -- one request ------------------------------------------------------------------------------

    async def look(
        self,
        served: ServedModel,
        hashes: bytes,
        milestones: Milestones | None = None,
        prefixes: ClassPrefixes | None = None,
    ) -> Sighting:
        """Hits, siblings, classes and counters of a fleet, in one round trip.

        Args:
            served: from `find`.
            hashes: chain of the prompt's block hashes, from `block_hash.chain`; b"" for no hits.
            milestones: of that chain; None for no siblings.
            prefixes: of that chain; None for no classes.

        Raises:
            IndexUnavailable: Redis did not answer in time, or is not asked because it did not
                before; or what it holds is less than it will be in a moment.
        """
        depth_blocks = _no_depth(served.fleet)
        tier_depth_blocks = None if served.roster.tiers is None else _no_depth(served.fleet)
        taken_s = time.time()
        try:
            with self._guard.asking(Call.READ):
                read = reservations.read(served.fleet.fleet_id, milestones, prefixes)
                counters, siblings, recent = await self._ask(
                    served.fleet, hashes, read, depth_blocks, tier_depth_blocks
                )
                current = await self._current(served, counters) if counters is not None else None
        except Unreadable as error:
            self._note_unreadable(served.fleet.fleet_id.encode(), error)
            raise IndexUnavailable("What Redis holds of this fleet cannot be read.") from error
        except REDIS_WEATHER as error:
            telemetry.INDEX_ERRORS.labels(call="look").inc()
            raise IndexUnavailable("The index (Redis) does not answer. Try again.") from error
        if counters is None or current is None:
            telemetry.INDEX_ERRORS.labels(call="look").inc()
            raise IndexUnavailable(
                "The fleet in the index (Redis) is not complete yet. Try again.",
                cause=DegradedCause.INDEX_INCOMPLETE,
            )
        self._heard_s = time.monotonic()
        if current.fleet != served.fleet:  # founded anew: the lookup was made in the old shape
            depth_blocks = _no_depth(current.fleet)
            tier_depth_blocks = None
        return Sighting(
            fleet=current.fleet,
            roster=current.roster,
            counters=counters,
            depth_blocks=depth_blocks,
            tier_depth_blocks=tier_depth_blocks,
            siblings=siblings,
            taken_s=taken_s,
            recent_classes=recent,
        )

    def last_sighting(self, served: ServedModel) -> Sighting:
        """The fleet as last read, without hits; `taken_s` says when that was.

        Raises:
            IndexUnavailable: it was never read.
        """
        known = self._fleets.get(served.fleet.fleet_id)
        if known is None:
            raise IndexUnavailable(
                "The index (Redis) does not answer and this router has not seen the fleet yet."
            )
        return Sighting(
            fleet=served.fleet,
            roster=served.roster,
            counters=known.counters,
            depth_blocks=_no_depth(served.fleet),
            taken_s=known.read_s,
            degraded=True,
        )

    async def _ask(
        self,
        fleet: FleetRecord,
        hashes: bytes,
        read: FunctionCall,
        depth_blocks: Column,
        tier_depth_blocks: Column | None = None,
    ) -> tuple[FleetCounters | None, npt.NDArray[np.void], RecentClasses | None]:
        together = self._link.has_all_keys
        lookups = index_functions.lookups(fleet, hashes, together=together)
        of_tier = []
        if tier_depth_blocks is not None:
            of_tier = index_functions.lookups(fleet, hashes, together=together, tier=True)
        with reading():
            replies = await functions.run_all(self._link, (read, *lookups, *of_tier))
            tier_at = 1 + len(lookups)
            index_functions.all_depths(lookups, replies[1:tier_at], depth_blocks)
            if tier_depth_blocks is not None:
                index_functions.all_depths(of_tier, replies[tier_at:], tier_depth_blocks)
            counters = reservations.fleet_counters(replies[0])
            siblings = reservations.siblings(replies[0])
            return counters, siblings, reservations.recent_classes(replies[0])

    async def _current(self, served: ServedModel, counters: FleetCounters) -> ServedModel | None:
        """The same model after whatever changed in its fleet's membership.

        None while Redis holds less of the fleet than is known here and will be back soon.
        """
        known = self._fleets.get(served.fleet.fleet_id)
        if known is not None and known.outlasts(counters):
            return None
        if known is not None and known.is_current(counters):
            known.see(counters)
            return known.models.get(served.name, served)
        async with self._refreshing:
            await self._refresh_fleet(served.fleet.fleet_id, counters)
            self._rebuild_models()
        known = self._fleets.get(served.fleet.fleet_id)
        if known is None or known.record.epoch != counters.epoch:
            return None
        return known.models.get(served.name, served)

    # -- what operators see -----------------------------------------------------------------------

    def not_ready_reason(self) -> str | None:
        """Why this router should get no traffic, or None.

        Without Redis a router that knows a fleet still serves, degraded, so it stays ready.
        """
        if self._heard_s == -np.inf:
            reason = self._guard.degraded_reason()
            return "Redis has not answered yet" + (f" ({reason})" if reason else "")
        if not any(fleet.instances for fleet in self._fleets.values()):
            return "no instance has announced itself"
        return None

    def degraded_reason(self) -> str | None:
        """Why requests are decided from what was known before, or None."""
        if reason := self._guard.degraded_reason():
            return reason
        for known in self._fleets.values():
            if known.emptied_s is not None or known.lapsed_s is not None:
                return f"the fleet of {known.record.model_scope} is not complete in Redis yet"
        return None

    def heard_age_s(self) -> float:
        """Seconds since Redis last answered; infinite before it ever did."""
        return time.monotonic() - self._heard_s

    def completeness(self) -> dict[str, dict[str, float]]:
        """Model scope -> label of each instance -> completeness of its index. From memory."""
        return {fleet.record.model_scope: fleet.completeness() for fleet in self._fleets.values()}

    async def fleet_view(self) -> dict[str, Any]:
        """Everything known of every fleet, with names, fresh from Redis where it answers."""
        fresh = True
        try:
            await self.refresh()
        except REDIS_WEATHER:
            fresh = False
        fleets = [fleet.view() for fleet in self._fleets.values()]
        reason = self.degraded_reason()
        return {
            "fresh": fresh,
            "degraded": reason is not None,
            "reason": reason,
            "redis_heard_age_s": self.heard_age_s(),
            "fleets": fleets,
        }


def _no_depth(fleet: FleetRecord) -> Column:
    return np.zeros(fleet.partitions * SLOTS_PER_PARTITION_MAX, np.int64)
