"""What Redis holds of classes that may be in trouble, for whoever watches this router.

No request waits for it: what a decision needs comes with its own look at the index.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import structlog

from indexer.contract import functions, request_classes
from indexer.contract.functions import REDIS_WEATHER
from indexer.contract.identifiers import FleetId
from indexer.contract.limits import CLASS_WINDOW_S
from indexer.contract.link import Link
from indexer.contract.records import FleetRecord
from indexer.contract.request_classes import ClassState, Standing
from router import telemetry

log = structlog.get_logger()

WATCH_S: Final = 1.0

_STANDINGS: Final = (Standing.WATCHED, Standing.TAKEN_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Classes of one fleet when it was last asked.

    Attributes:
        requests: booked in the last CLASS_WINDOW_S, by routers that count them.
        states: of classes that may be in trouble, largest share first.
    """

    requests: float
    states: list[ClassState]


class ClassWatch:
    """Keeps the states of all fleets' classes; tells metrics, log and `/fleet`.

    Args:
        link: to Redis.
        deadline_s: for one call.
        fleets: those there are now.
    """

    def __init__(
        self, link: Link, *, deadline_s: float, fleets: Callable[[], Iterable[FleetRecord]]
    ) -> None:
        self._link = link
        self._deadline_s = deadline_s
        self._fleets = fleets
        self._seen: dict[FleetId, Seen] = {}
        self._shown: set[str] = set()

    async def run(self) -> None:
        """Ask every WATCH_S until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(WATCH_S)

    async def refresh(self) -> None:
        """Ask for every fleet; one that cannot be read keeps what was known of it."""
        fleets = {one.fleet_id: one for one in self._fleets()}
        for gone in self._seen.keys() - fleets.keys():
            del self._seen[gone]
        for scope in self._shown - {one.model_scope for one in fleets.values()}:
            self._shown.discard(scope)
            for standing in _STANDINGS:
                telemetry.HOT_CLASSES.remove(scope, standing.name.lower())
        for fleet in fleets.values():
            try:
                async with asyncio.timeout(self._deadline_s):
                    reply = await functions.run(self._link, request_classes.classes(fleet.fleet_id))
                requests, states = request_classes.class_states(reply)
            except (*REDIS_WEATHER, ValueError):
                telemetry.INDEX_ERRORS.labels(call="classes").inc()
                continue
            self._tell_changes(fleet, states)
            self._seen[fleet.fleet_id] = Seen(requests=requests, states=states)
            self._show(fleet.model_scope, states)

    def annotate(self, view: dict[str, Any]) -> None:
        """Add what is known to the view of every fleet."""
        for fleet in view["fleets"]:
            seen = self._seen.get(FleetId(fleet["fleet_id"]), Seen(requests=0.0, states=[]))
            fleet["classes"] = {
                "window_s": CLASS_WINDOW_S,
                "requests": round(seen.requests, 1),
                "hot": [asdict(state) for state in seen.states],
            }

    def _tell_changes(self, fleet: FleetRecord, states: list[ClassState]) -> None:
        before = self._seen.get(fleet.fleet_id)
        known = {one.name for one in before.states if one.taken_out} if before else set()
        for one in states:
            if one.taken_out and one.name not in known:
                log.warning("class_taken_out", fleet=fleet.model_scope, **asdict(one))
        for name in known - {one.name for one in states if one.taken_out}:
            log.info("class_readmitted", fleet=fleet.model_scope, name=name)

    def _show(self, scope: str, states: list[ClassState]) -> None:
        self._shown.add(scope)
        taken_out = sum(one.taken_out for one in states)
        for standing, count in zip(_STANDINGS, (len(states) - taken_out, taken_out), strict=True):
            telemetry.HOT_CLASSES.labels(scope, standing.name.lower()).set(count)
