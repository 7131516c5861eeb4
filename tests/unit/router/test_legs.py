"""Who may take which leg of a request, and who decodes it."""

from typing import Any

import numpy as np
import pytest
from builders import make_instance, make_request, make_snapshot

from indexer.contract.records import InstanceRecord, Role
from router.decide import decide
from router.decode_leg import DECODE_LEG
from router.eligibility import Ability, Roster, abilities
from router.errors import NoEligibleInstance
from router.legs import Leg, first_leg, first_pool, handed_over, leg_at, pool
from router.policies.lmetric import LMetric
from router.snapshot import FleetSnapshot

ROLES = {"p": "prefill", "d": "decode", "b": "both", "?": "of another age"}


def snapshot(kinds: str, **columns: Any) -> FleetSnapshot:
    """Instances of these kinds; see ROLES."""
    seen = make_snapshot(**({"hit_tokens": [0] * len(kinds)} | columns))
    roster = Roster.of({i: make_instance(k, role=ROLES[k]) for i, k in enumerate(kinds)})
    object.__setattr__(seen, "instances", roster.instances)
    object.__setattr__(seen, "abilities", roster.abilities)
    return seen


def kinds(seen: FleetSnapshot) -> str:
    """Of the instances that are left."""
    return "".join(one.instance_id for one in seen.instances)


@pytest.mark.parametrize(
    ("fleet", "prefill", "decode", "whole", "undecoded"),
    [
        ("pd", "p", "d", "d", "p"),
        ("pdb", "pb", "db", "db", "pb"),
        ("pb", "pb", "b", "b", "pb"),
        ("db", "b", "db", "db", "b"),
        ("pddb", "pb", "ddb", "ddb", "pb"),
        ("p", "p", "", "p", "p"),
        ("d", "d", "d", "d", "d"),
        ("bb", "bb", "bb", "bb", "bb"),
        ("pd?", "p", "d", "d", "p"),
        ("?", "", "", "", ""),
    ],
)
def test_the_pool_of_each_leg(
    fleet: str, prefill: str, decode: str, whole: str, undecoded: str
) -> None:
    """Those whose role it is; a whole request goes to all who decode, not to a lone one of both."""

    def asked(leg: Leg, *, decodes: bool = True) -> str:
        try:
            return kinds(pool(snapshot(fleet), leg, decodes=decodes))
        except NoEligibleInstance:
            return ""

    assert asked(Leg.PREFILL) == prefill
    assert asked(Leg.DECODE) == decode
    assert asked(Leg.WHOLE) == whole
    assert asked(Leg.WHOLE, decodes=False) == undecoded


@pytest.mark.parametrize(
    ("fleet", "leg"),
    [("pd", "prefill"), ("pb", "prefill"), ("p", "whole"), ("d", "whole"), ("bb", "whole")],
)
def test_a_request_is_parted_where_both_pools_are(fleet: str, leg: str) -> None:
    """And where it can be."""
    assert first_leg(snapshot(fleet), parts=True) == leg
    assert first_leg(snapshot(fleet), parts=False) is Leg.WHOLE


@pytest.mark.parametrize("fleet", ["pd", "pdb", "pb", "db", "p", "d", "bb", "pd?"])
@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("decodes", [True, False])
def test_the_number_of_a_pool_tells_who_is_in_it(fleet: str, *, parts: bool, decodes: bool) -> None:
    """The instances with that ability are those who may take the first leg; 0 is everybody."""
    seen = snapshot(fleet)
    number = first_pool(seen.abilities, parts=parts, decodes=decodes)
    taking = pool(seen, first_leg(seen, parts=parts), decodes=decodes)
    if seen.abilities is None:
        assert (number, kinds(taking)) == (0, fleet)
    else:
        able = {Ability.PREFILL: "pb", Ability.DECODE: "db"}[Ability(number)]
        assert kinds(taking) == "".join(one for one in fleet if one in able)


def test_a_whole_request_goes_where_the_score_is_lowest_among_all_who_decode() -> None:
    """The only instance for both is no bottleneck of what cannot be parted, and takes its share."""
    for batches, expected in (([0, 9, 0, 4], "d"), ([0, 9, 9, 4], "b")):
        taking = pool(snapshot("pddb", batch_size=batches), Leg.WHOLE)
        chosen = decide(LMetric(), make_request(), taking)
        assert chosen.instance.instance_id == expected


def test_the_chosen_instance_decides_between_one_leg_and_two() -> None:
    """By the policy's score: whoever holds the prompt and decodes as well answers alone."""
    for hits, expected in (([0, 96], Leg.WHOLE), ([96, 0], Leg.PREFILL)):
        seen = snapshot("pb", hit_tokens=hits)
        decision = decide(LMetric(), make_request(), pool(seen, Leg.PREFILL))
        assert leg_at(Leg.PREFILL, decision) is expected


def test_records_without_a_role_are_for_both() -> None:
    """As sidecars before it wrote them; and a fleet of such ones has no columns of abilities."""
    packed = make_instance("a", role="prefill").encode()
    assert InstanceRecord.decode(packed).role == Role.PREFILL
    older = packed.replace(b"\xa4role", b"\xa4rolx")
    assert InstanceRecord.decode(older).role == Role.BOTH
    assert abilities([Role.BOTH, "both"]) is None


@pytest.mark.parametrize(
    ("batch_size", "kv_usage_ratio", "chosen"),
    [
        ([3, 2], [0.5, 0.5], 1),  # equal usage: the smaller batch
        ([2, 2], [0.2, 0.1], 1),  # equal batches: the emptier KV$
        ([7, 3], [0.1, 0.6], 0),  # 8 / 0.9 < 4 / 0.4
        ([7, 3], [0.6, 0.1], 1),
        ([0, 90], [1.0, 0.0], 1),  # 1 / 0.01 > 91: full to the last block
        ([0, 120], [1.0, 0.0], 0),
    ],
)
def test_who_decodes(batch_size: list[int], kv_usage_ratio: list[float], chosen: int) -> None:
    """(batch + 1) / free share of the KV$, by hand; hits and queues do not count."""
    seen = snapshot("dd", batch_size=batch_size, hit_tokens=[64, 0])
    object.__setattr__(seen, "kv_usage_ratio", np.array(kv_usage_ratio))
    decision = decide(DECODE_LEG, make_request(), handed_over(seen, 100))
    assert decision.index == chosen
    assert (decision.hit_tokens, decision.new_prefill_tokens) == (99, 1)
