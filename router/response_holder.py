"""A request that names an answer which one instance holds goes to that instance. Pure.

Where that one cannot take it, the request is decided like any other, and whichever engine it comes
to says itself that it holds no such answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from indexer.contract.records import SlotFlag
from indexer.contract.responses import Holder
from router.door.visitor import Caller
from router.eligibility import Sighting, take
from router.errors import Forbidden
from router.index.known_fleets import ServedModel
from router.requests.api_call import Cost
from router.snapshot import FleetSnapshot

_NOT_WITHOUT_MODEL: Final = (
    "This key is not for the model that answers without `model`: name one that it is for. "
    "GET /v1/models lists them."
)
_NOT_HELD_FOR: Final = (
    "This key is for no model of the engines that may hold this answer. "
    "GET /v1/models lists those that it is for."
)


def served_at(holder: Holder | None, models: Mapping[str, ServedModel]) -> ServedModel | None:
    """A model to ask for, of the holder's fleet, on behalf of a request that names none.

    Of any fleet where nobody knows the holder: all of them will say that they hold no such answer.
    None where no fleet is left.
    """
    bases = [one for _, one in sorted(models.items()) if one.adapter is None]
    of_fleet = [one for one in bases if holder and holder.is_in(one.fleet.fleet_id)] or bases
    of_scope = [one for one in of_fleet if one.name == one.fleet.model_scope]
    return next(iter(of_scope or of_fleet), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Whom a request may reach that names an answer and no model.

    What an engine computes without a model's name its base model computes: the key has to be for
    that one. What it only looks up may have been made with any name of its fleet, adapters' too.

    Attributes:
        caller: who asks; None: anybody.
        aliases: name that clients may ask for -> name that engines serve.
        cost: of the request.
    """

    caller: Caller | None
    aliases: Mapping[str, str]
    cost: Cost

    def among(
        self, models: Mapping[str, ServedModel], holder: Holder | None
    ) -> Mapping[str, ServedModel]:
        """Those of these models whose fleets it may reach.

        Raises:
            Forbidden: there are none, or not those of the answer's holder; names no model.
        """
        caller = self.caller
        if caller is None or caller.models is None or not models:
            return models
        aliased = {name: models[to] for name, to in self.aliases.items() if to in models}
        fleets = {
            one.fleet.fleet_id
            for name, one in (*models.items(), *aliased.items())
            if caller.may_use(name) and (self.cost is Cost.NONE or one.adapter is None)
        }
        others = {one.fleet.fleet_id for one in models.values()} - fleets
        if not fleets or (holder is not None and any(map(holder.is_in, others))):
            raise Forbidden(_NOT_HELD_FOR if self.cost is Cost.NONE else _NOT_WITHOUT_MODEL)
        return {name: one for name, one in models.items() if one.fleet.fleet_id in fleets}


def though_draining(sighting: Sighting, holder: Holder) -> Sighting:
    """The sighting with the holder eligible while it drains: it goes on with what it has."""
    rows = sighting.counters.slots.copy()
    for slot, one in zip(sighting.roster.slot.tolist(), sighting.roster.instances, strict=True):
        if holder.is_at(one.instance_id) and slot < len(rows):
            rows["flags"][slot] &= ~np.uint32(SlotFlag.DRAINING)
    return replace(sighting, counters=replace(sighting.counters, slots=rows))


def at_holder(snapshot: FleetSnapshot, holder: Holder) -> FleetSnapshot | None:
    """The snapshot of the holder alone; None when it is not in it.

    Nobody else can answer, so nobody else is asked when it fails or pushes back.
    """
    places = [i for i, one in enumerate(snapshot.instances) if holder.is_at(one.instance_id)]
    return take(snapshot, np.array(places[-1:], np.intp)) if places else None
