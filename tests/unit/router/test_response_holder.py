"""A request that names what one instance holds: who may be asked for it."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_fleet_record, make_instance, make_snapshot

from indexer.contract import keys
from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.records import COUNTERS_RECORD, FleetCounters, SlotFlag
from indexer.contract.responses import Holder
from router.door.visitor import Caller
from router.eligibility import Roster, Sighting, eligible_snapshot
from router.errors import Forbidden, NoEligibleInstance
from router.index.known_fleets import ServedModel
from router.requests.api_call import Cost
from router.response_holder import Rights, at_holder, served_at, though_draining

FLEET = make_fleet_record()
HOLDER = Holder.of(FLEET.fleet_id, InstanceId("b"))


def served(name: str, scope: str, adapter: str | None = None) -> ServedModel:
    """A name that a fleet of one instance serves."""
    return ServedModel(
        name=name,
        fleet=replace(FLEET, model_scope=scope, fleet_id=keys.fleet_id(scope)),
        adapter=adapter,
        max_model_len_tokens=None,
        model_root=scope,
        roster=Roster.of({0: make_instance()}),
    )


def test_the_holder_alone_is_left_whatever_the_scores() -> None:
    """In all columns; and nobody where it is not among them."""
    snapshot = make_snapshot(100, hit_tokens=[0, 16, 32], batch_size=[1, 2, 3])
    alone = at_holder(snapshot, HOLDER)
    assert alone is not None
    assert [one.instance_id for one in alone.instances] == ["b"]
    assert (alone.batch_size.tolist(), alone.hit_tokens.tolist()) == ([2], [16])
    assert at_holder(snapshot, Holder.of(FLEET.fleet_id, InstanceId("z"))) is None


@pytest.mark.parametrize(
    ("state", "eligible"),
    [(SlotFlag.DRAINING, True), (SlotFlag.DRAINING | SlotFlag.SLEEPING, False)],
)
def test_a_draining_holder_may_be_read_and_no_other(state: SlotFlag, eligible: bool) -> None:
    """Draining alone is overlooked, of the holder alone; the sighting itself stays as it was."""
    rows = np.zeros(2, COUNTERS_RECORD)
    rows["flags"], rows["lease_until_s"] = SlotFlag.USED | state, 10.0
    sighting = Sighting(
        fleet=FLEET,
        roster=Roster.of({0: make_instance("a"), 1: make_instance("b")}),
        counters=FleetCounters(now_s=1.0, membership=1, epoch=FLEET.epoch, slots=rows),
        depth_blocks=np.zeros(2, np.int64),
        taken_s=0.0,
    )
    seen = though_draining(sighting, HOLDER)
    if eligible:
        assert [one.instance_id for one in eligible_snapshot(seen, 1).instances] == ["b"]
    else:
        with pytest.raises(NoEligibleInstance):
            eligible_snapshot(seen, 1)
    with pytest.raises(NoEligibleInstance):
        eligible_snapshot(sighting, 1)


def test_an_id_stands_for_a_model_of_its_holders_fleet() -> None:
    """Of any fleet where the holder is unknown, or its fleet has gone; never an adapter."""
    models = {
        one.name: one
        for one in (
            served("an-adapter", "m", adapter="an-adapter"),
            served("an-alias", "m"),
            served("m", "m"),
            served("other", "other"),
        )
    }
    fleet_id = models["other"].fleet.fleet_id
    assert served_at(Holder.of(fleet_id, InstanceId("b")), models) is models["other"]
    fleet_id = models["m"].fleet.fleet_id
    assert served_at(Holder.of(fleet_id, InstanceId("b")), models) is models["m"]
    assert served_at(None, models) is models["m"]
    assert served_at(None, {}) is None


OURS, OTHERS = keys.fleet_id("m"), keys.fleet_id("other")
MODELS = {
    one.name: one
    for one in (
        served("m", "m"),
        served("an-adapter", "m", "an-adapter"),
        served("other", "other"),
        served("their-adapter", "other", "their-adapter"),
    )
}
ALIASES = {"soft": "an-adapter", "pretty": "m", "lost": "nowhere"}


def reached(names: list[str] | None, cost: Cost, fleet: FleetId | None) -> set[str] | None:
    """Fleets that a key for these names reaches with the id of an answer; None: refused."""
    caller = None if names is None else Caller(name="k", models=frozenset(names))
    holder = None if fleet is None else Holder.of(fleet, InstanceId("b"))
    try:
        models = Rights(caller=caller, aliases=ALIASES, cost=cost).among(MODELS, holder)
    except Forbidden:
        return None
    return {one.fleet.fleet_id for one in models.values()}


@pytest.mark.parametrize(
    ("names", "looked_up", "computed"),
    [
        (None, {OURS, OTHERS}, {OURS, OTHERS}),
        (["m"], {OURS}, {OURS}),
        (["pretty"], {OURS}, {OURS}),
        (["an-adapter"], {OURS}, None),
        (["soft"], {OURS}, None),
        (["an-adapter", "other"], {OURS, OTHERS}, {OTHERS}),
        (["lost", "nowhere"], None, None),
        ([], None, None),
    ],
)
def test_a_key_reaches_fleets_by_names_and_aliases_and_work_by_those_of_base_models(
    names: list[str] | None, looked_up: set[FleetId] | None, computed: set[FleetId] | None
) -> None:
    """Whoever holds the answer is refused where its fleet is not reached; unknown, others are not.

    An adapter's key must not have the base model compute for it, by leaving the name out.
    """
    for cost, expected in ((Cost.NONE, looked_up), (Cost.PREFILL, computed)):
        assert reached(names, cost, None) == expected
        assert reached(names, cost, keys.fleet_id("gone")) == expected
        for fleet in (OURS, OTHERS):
            allowed = expected if expected is not None and fleet in expected else None
            assert reached(names, cost, fleet) == allowed


def test_without_any_fleet_nobody_is_refused() -> None:
    """There is nothing to be for or against: the request is told that no instance is here."""
    rights = Rights(caller=Caller(name="k", models=frozenset({"m"})), aliases={}, cost=Cost.NONE)
    assert rights.among({}, None) == {}
