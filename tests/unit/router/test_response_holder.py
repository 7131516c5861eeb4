"""A request that names what one instance holds: who may be asked for it."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_fleet_record, make_instance, make_snapshot

from indexer.contract import keys
from indexer.contract.identifiers import InstanceId
from indexer.contract.records import COUNTERS_RECORD, FleetCounters, SlotFlag
from indexer.contract.responses import Holder
from router.door.visitor import Caller
from router.eligibility import Roster, Sighting, eligible_snapshot
from router.errors import ModelForbidden, NoEligibleInstance
from router.index.known_fleets import ServedModel
from router.response_holder import at_holder, refuse_foreign, served_at, though_draining

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


def test_a_key_reaches_what_its_models_fleets_hold() -> None:
    """By any name of the fleet; keys for other models, or for none, do not."""
    models = [served("m", "m"), served("an-adapter", "m", "an-adapter"), served("other", "other")]
    refuse_foreign(None, models[0], models)
    refuse_foreign(Caller(name="k"), models[0], models)
    refuse_foreign(Caller(name="k", models=frozenset({"an-adapter"})), models[0], models)
    with pytest.raises(ModelForbidden, match="`m`"):
        refuse_foreign(Caller(name="k", models=frozenset({"other"})), models[0], models)
