"""A request that names an answer which one instance holds goes to that instance. Pure.

Where that one cannot take it, the request is decided like any other, and whichever engine it comes
to says itself that it holds no such answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from indexer.contract.records import SlotFlag
from indexer.contract.responses import Holder
from router.door.visitor import Caller
from router.eligibility import Sighting, take
from router.errors import ModelForbidden
from router.index.known_fleets import ServedModel
from router.snapshot import FleetSnapshot


def served_at(holder: Holder | None, models: Mapping[str, ServedModel]) -> ServedModel | None:
    """A model to ask for, of the holder's fleet, on behalf of a request that names none.

    Of any fleet where nobody knows the holder: all of them will say that they hold no such answer.
    None where no fleet is left.
    """
    bases = [one for _, one in sorted(models.items()) if one.adapter is None]
    of_fleet = [one for one in bases if holder and holder.is_in(one.fleet.fleet_id)] or bases
    of_scope = [one for one in of_fleet if one.name == one.fleet.model_scope]
    return next(iter(of_scope or of_fleet), None)


def refuse_foreign(
    caller: Caller | None, served: ServedModel, models: Iterable[ServedModel]
) -> None:
    """Refuse a request that names no model to a key that is for none of the fleet's.

    Raises:
        ModelForbidden: with the fleet's model.
    """
    fleet = served.fleet.fleet_id
    if caller is None or any(
        caller.may_use(one.name) for one in models if one.fleet.fleet_id == fleet
    ):
        return
    raise ModelForbidden(served.fleet.model_scope)


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
