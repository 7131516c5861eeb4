"""Whether an engine is to take new requests, and what is still in flight at it.

The wish lives here, in the sidecar, and every heartbeat carries it: neither a slot that is lost and
joined anew nor a Redis that was emptied forgets it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from indexer.contract.records import EngineCounters, SlotFlag, Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What is in flight at one rank, as its last answered heartbeat told.

    Attributes:
        reserved_requests: of all routers, on its slot.
        counters: of the engine; None when its metrics do not tell them.
    """

    reserved_requests: int
    counters: EngineCounters | None


class Drain:
    """The wish of an operator for all ranks of one engine, and how far it has come.

    Attributes:
        is_draining: no new request shall come.
    """

    def __init__(self, *, is_draining: bool = False) -> None:
        self.is_draining = is_draining
        self._ranks: dict[str, RankLoad | None] = {}
        self._log = structlog.get_logger()

    def wish(self, *, is_draining: bool) -> None:
        """Drain, or take requests again; saying it twice changes nothing."""
        if is_draining == self.is_draining:
            return
        self.is_draining = is_draining
        self.expect(self._ranks)  # what was heard before says nothing about the new wish
        self._log.info("draining" if is_draining else "drain_ended")

    def one(self, engine: str) -> None:
        """There is no other engine, and this one is meant without a name."""

    def flags(self) -> SlotFlag:
        """What a slot says of the wish."""
        return SlotFlag.DRAINING if self.is_draining else SlotFlag(0)

    def expect(self, ranks: Iterable[str]) -> None:
        """These are the engine's ranks now; nothing has been heard of them yet."""
        self._ranks = dict.fromkeys(ranks)

    def heard(self, rank: str, load: RankLoad, *, is_draining: bool) -> None:
        """A rank's heartbeat was answered; it carried this wish."""
        if is_draining == self.is_draining:
            self._ranks[rank] = load

    def unheard(self, rank: str) -> None:
        """A rank has no lease now: nobody knows what is in flight there."""
        self._ranks[rank] = None

    def state(self) -> dict[str, Any]:
        """For operators, as JSON.

        `announced`: every rank's slot carries the wish; `empty`: it does, and nothing is in flight.
        """
        loads = [load for load in self._ranks.values() if load is not None]
        engines = [load.counters for load in loads if load.counters is not None]
        reserved_requests = sum(load.reserved_requests for load in loads)
        running_count = sum(one.running_count for one in engines)
        waiting_count = sum(one.waiting_count for one in engines)
        is_announced = bool(loads) and len(loads) == len(self._ranks)
        is_known = is_announced and len(engines) == len(loads)
        return {
            "draining": self.is_draining,
            "announced": is_announced,
            "empty": is_known and not (reserved_requests or running_count or waiting_count),
            "ranks": len(self._ranks),
            "reserved_requests": reserved_requests,
            "running_count": running_count,
            "waiting_count": waiting_count,
        }


def obeyed(notices: Sequence[bytes], drain: Drain) -> list[bytes]:
    """Do what operators wish by way of routers; returns the notices that are something else."""
    others = []
    for raw in notices:
        wish = Wish.decode(raw)
        if wish is None:
            others.append(raw)
        else:
            drain.wish(is_draining=wish.draining)
    return others
