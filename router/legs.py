"""Where prefill and decode are apart: the legs of a request, and who may take which. Pure.

A request's first leg goes to whom the policy chooses among all instances that prefill. One that
decodes as well answers the whole request; so do its queue, its batch and what it holds already
decide between one leg and two, by the same score. One that only prefills hands over its KV$, and
the decode leg goes to an instance that decodes.

Every engine can compute a whole request: what an instance is for is the operator's wish. So where
one of the two pools is empty, or a request cannot be parted, an instance answers it whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from indexer.contract.identifiers import InstanceId
from router.eligibility import Ability, take
from router.errors import NoEligibleInstance
from router.snapshot import Column, Decision, FleetSnapshot

WHOLE_FLEET: Final = 0
"""Number of the pool of a fleet without roles."""


class Leg(StrEnum):
    """What an instance does for a request."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What a prefill leg leaves to its decode leg.

    Attributes:
        decision: where the prefill was.
        params: `kv_transfer_params` of its answer, as they stand there; None when it gave none:
            then the decode leg computes the prompt itself.
        given_s: monotonic time of the answer.
    """

    decision: Decision
    params: bytes | None
    given_s: float

    @property
    def instance_id(self) -> InstanceId:
        """Who holds the KV$."""
        return self.decision.instance.instance_id


def first_leg(snapshot: FleetSnapshot, *, parts: bool) -> Leg:
    """PREFILL where a request may be parted: `leg_at` says what it is for the chosen instance.

    Args:
        snapshot: who is eligible.
        parts: the request can be parted.
    """
    return _first_leg(snapshot.abilities, parts=parts)


def _first_leg(abilities: Column | None, *, parts: bool) -> Leg:
    if abilities is None or not parts:
        return Leg.WHOLE
    pools = ((abilities & one).any() for one in (Ability.PREFILL, Ability.DECODE))
    return Leg.PREFILL if all(pools) else Leg.WHOLE


def first_pool(abilities: Column | None, *, parts: bool, decodes: bool) -> int:
    """The number of the pool from which somebody takes a request's first leg.

    What is counted of one pool says nothing of another: other instances hold other things there,
    and are asked by other requests.

    Args:
        abilities: of the fleet's instances.
        parts: the request can be parted.
        decodes: it generates more than a token.

    Returns:
        WHOLE_FLEET where there are no roles, else one of Ability.
    """
    if abilities is None:
        return WHOLE_FLEET
    leg = _first_leg(abilities, parts=parts)
    pools = (one for one in _wanted(leg, decodes=decodes) if (abilities & one).any())
    return int(next(pools, WHOLE_FLEET))


def leg_at(leg: Leg, decision: Decision) -> Leg:
    """What the chosen instance does: an answer to the whole request, if it decodes as well."""
    abilities = decision.snapshot.abilities
    if leg is Leg.PREFILL and (abilities is None or abilities[decision.index] & Ability.DECODE):
        return Leg.WHOLE
    return leg


def pool(snapshot: FleetSnapshot, leg: Leg, *, decodes: bool = True) -> FleetSnapshot:
    """Those of the snapshot who may take this leg.

    A whole request goes to those who decode, be they for both or not: most of its time is decoding,
    and the policy's score sees who has little else to do. Those for both alone would be one crowded
    instance among idle ones wherever they are few. One that generates no more than a token ends
    with its prefill.

    Raises:
        NoEligibleInstance: nobody may.
    """
    abilities = snapshot.abilities
    if abilities is None:
        return snapshot
    for wanted in _wanted(leg, decodes=decodes):
        places = (abilities & wanted).nonzero()[0]
        if places.size:
            return take(snapshot, places)
    what = "decode" if leg is Leg.DECODE else "take"
    raise NoEligibleInstance(
        f"No instance of `{snapshot.fleet.model_scope}` can {what} this request now. Their roles: "
        f"{', '.join(sorted({one.role for one in snapshot.instances}))}. Try again later."
    )


def _wanted(leg: Leg, *, decodes: bool) -> Sequence[Ability]:
    if leg is Leg.DECODE:
        return (Ability.DECODE,)
    if leg is Leg.PREFILL or not decodes:
        return (Ability.PREFILL, Ability.DECODE)
    return (Ability.DECODE, Ability.PREFILL)


def handed_over(snapshot: FleetSnapshot, prompt_tokens: int) -> FleetSnapshot:
    """The snapshot for a decode leg whose prompt is computed: only its last token is left."""
    count = len(snapshot.instances)
    return replace(
        snapshot,
        hit_tokens=np.full(count, prompt_tokens - 1, np.int64),
        in_flight_tokens=np.zeros(count, np.int64),
        new_prefill_tokens=np.ones(count, np.int64),
        tier_tokens=None,
        tier_cost_tokens=None,
    )
