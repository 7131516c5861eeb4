"""Who may be chosen, and the engine's rule for what it can reuse."""

import numpy as np
import pytest
from builders import make_fleet_record, make_instance
from hypothesis import given
from hypothesis import strategies as st

from indexer.contract.records import COUNTERS_RECORD, FleetCounters, SlotFlag
from indexer.contract.reservations import SIBLING
from router.eligibility import (
    Roster,
    Sighting,
    are_eligible,
    eligible_snapshot,
    ineligible_reason,
    slowness,
    without,
)
from router.errors import NoEligibleInstance
from router.snapshot import FleetSnapshot

NOW_S = 1000.0
STATE = [("flags", np.uint32), ("lease_until_s", np.float64)]


def snapshot(
    *rows: dict[str, float],
    depth_blocks: list[int] | None = None,
    prompt_tokens: int = 100,
    block_size_tokens: int = 16,
    degraded: bool = False,
) -> FleetSnapshot:
    """Instances a, b, ... in slots 0, 1, ... with these counters; alive unless said otherwise."""
    slots = np.zeros(len(rows), COUNTERS_RECORD)
    for slot, row in zip(slots, rows, strict=True):
        values = {"generation": 1, "flags": SlotFlag.USED, "lease_until_s": NOW_S + 1} | row
        for name, value in values.items():
            slot[name] = value
    records = {
        i: make_instance(chr(ord("a") + i), block_size_tokens=block_size_tokens)
        for i in range(len(rows))
    }
    depths = np.zeros(256, np.int64)
    depths[: len(rows)] = depth_blocks or [0] * len(rows)
    sighting = Sighting(
        fleet=make_fleet_record(),
        roster=Roster.of(records),
        counters=FleetCounters(now_s=NOW_S, membership=1, epoch=7, slots=slots),
        depth_blocks=depths,
        taken_s=0.0,
        degraded=degraded,
    )
    return eligible_snapshot(sighting, prompt_tokens)


def ids(fleet: FleetSnapshot) -> list[str]:
    """Instance ids in order."""
    return [record.instance_id for record in fleet.instances]


@pytest.mark.parametrize(
    "state",
    [
        {"lease_until_s": NOW_S - 0.001},
        {"flags": SlotFlag(0)},
        {"flags": SlotFlag.USED | SlotFlag.CLOSING},
        {"flags": SlotFlag.USED | SlotFlag.DRAINING},
        {"flags": SlotFlag.USED | SlotFlag.SLEEPING},
    ],
)
def test_only_the_living_awake_and_staying_are_eligible(state: dict[str, float]) -> None:
    """One bad state is enough to be left out, and the others stay in order."""
    assert ids(snapshot({}, state, {})) == ["a", "c"]


@pytest.mark.parametrize(
    ("flags", "lease_until_s", "reason"),
    [
        (SlotFlag.USED, NOW_S, None),
        (SlotFlag.USED, NOW_S - 0.001, "lease ended"),
        (SlotFlag(0), NOW_S, "left"),
        (SlotFlag.USED | SlotFlag.CLOSING, 0.0, "closing"),
        (SlotFlag.USED | SlotFlag.DRAINING, NOW_S, "draining"),
        (SlotFlag.USED | SlotFlag.SLEEPING, NOW_S, "asleep"),
        (SlotFlag.USED | SlotFlag.DRAINING | SlotFlag.SLEEPING, NOW_S, "draining"),
        (SlotFlag.USED | 0x10, NOW_S, "in a state unknown here"),
    ],
)
def test_each_reason_has_a_name(flags: int, lease_until_s: float, reason: str | None) -> None:
    """What an operator reads is what decides."""
    (row,) = np.array([(flags, lease_until_s)], STATE)
    assert ineligible_reason(row, NOW_S) == reason


def test_one_row_and_many_are_judged_alike() -> None:
    """For all flags, one unknown among them, and leases before, at and after now."""
    states = [(flags, NOW_S + lease_s) for flags in range(0x20) for lease_s in (-0.001, 0.0, 5.0)]
    rows = np.array(states, STATE)
    assert are_eligible(rows, NOW_S).tolist() == [
        ineligible_reason(row, NOW_S) is None for row in rows
    ]
    assert are_eligible(rows, NOW_S).sum() == 2


def test_nobody_left_is_an_error_that_names_the_model() -> None:
    """A router without candidates says so instead of choosing the dead."""
    with pytest.raises(NoEligibleInstance, match="No instance of `m` can take a request"):
        snapshot({"lease_until_s": 1.0})


def test_a_degraded_snapshot_judges_by_what_was_seen_last() -> None:
    """Who had gone, drained or slept then is not chosen; nobody can say who has gone since."""
    fleet = snapshot(
        {}, {"lease_until_s": 1.0}, {"flags": SlotFlag.USED | SlotFlag.DRAINING}, degraded=True
    )
    assert (ids(fleet), fleet.degraded) == (["a"], True)


@pytest.mark.parametrize(
    ("prompt_tokens", "depth_blocks", "engine_block", "expected"),
    [
        (100, 6, 16, 96),
        (100, 0, 16, 0),
        (96, 6, 16, 80),  # wholly cached and aligned: the last token is computed again, so a block
        (97, 6, 16, 96),
        (640, 40, 16, 624),  # as seen from a real engine
        (100, 5, 64, 64),  # canonical depth 80 is one engine block of 64
        (100, 3, 64, 0),
        (1, 0, 16, 0),
    ],
)
def test_predicted_hits_follow_the_engines_rule(
    prompt_tokens: int, depth_blocks: int, engine_block: int, expected: int
) -> None:
    """At most all but the last token, floored to the engine's own block."""
    fleet = snapshot(
        {},
        depth_blocks=[depth_blocks],
        prompt_tokens=prompt_tokens,
        block_size_tokens=engine_block,
    )
    assert fleet.hit_tokens.tolist() == [expected]
    assert fleet.depth_tokens.tolist() == [16 * depth_blocks]  # as it is in the index
    assert fleet.new_prefill_tokens.tolist() == [prompt_tokens - expected]


@given(
    prompt_tokens=st.integers(1, 10_000),
    depth=st.integers(0, 700),
    engine_block=st.sampled_from([16, 32, 64, 128]),
)
def test_new_prefill_tokens_are_within_the_prompt(
    prompt_tokens: int, depth: int, engine_block: int
) -> None:
    """1 <= new prefill tokens <= prompt tokens, whatever the index says."""
    fleet = snapshot(
        {}, depth_blocks=[depth], prompt_tokens=prompt_tokens, block_size_tokens=engine_block
    )
    assert 1 <= fleet.new_prefill_tokens[0] <= prompt_tokens


def test_batch_size_is_reserved_plus_foreign() -> None:
    """What routers know of and what they do not."""
    fleet = snapshot(
        {
            "reserved_requests": 3,
            "foreign_requests": 2,
            "reserved_prefill_tokens": 50,
            "running_count": 4,
            "waiting_count": 1,
            "kv_usage_millionths": 250_000,
            "published_s": NOW_S - 0.5,
        },
        {},
    )
    assert fleet.batch_size.tolist() == [5, 0]
    assert fleet.queued_prefill_tokens.tolist() == [50, 0]
    assert (fleet.running_count[0], fleet.waiting_count[0]) == (4, 1)
    assert fleet.kv_usage_ratio.tolist() == [0.25, 0.0]
    assert fleet.counters_age_s.tolist() == [0.5, np.inf]


def test_siblings_count_as_far_as_the_engine_will_reuse_them() -> None:
    """On their slot and generation, to whole blocks of the engine, beyond what is resident."""
    records = {
        0: make_instance("a"),
        1: make_instance("b", block_size_tokens=64),
        2: make_instance("c"),
        3: make_instance("d"),
    }
    slots = np.zeros(4, COUNTERS_RECORD)
    slots["generation"], slots["flags"], slots["lease_until_s"] = 1, SlotFlag.USED, NOW_S + 1
    sighting = Sighting(
        fleet=make_fleet_record(),
        roster=Roster.of(records),
        counters=FleetCounters(now_s=NOW_S, membership=1, epoch=7, slots=slots),
        depth_blocks=np.array([2, 0, 20, 0], np.int64),
        siblings=np.array([(0, 1, 320), (1, 1, 320), (2, 1, 256), (3, 2, 320)], SIBLING),
        taken_s=0.0,
    )
    snapshot = eligible_snapshot(sighting, 320)
    assert snapshot.hit_tokens.tolist() == [304, 256, 304, 0]
    assert snapshot.in_flight_tokens.tolist() == [272, 256, 0, 0]
    assert snapshot.new_prefill_tokens.tolist() == [16, 64, 16, 320]


def test_an_instance_beyond_the_counters_is_not_there_yet() -> None:
    """Records and counters are read one after the other; the later one may know more."""
    roster = Roster.of({0: make_instance("a"), 9: make_instance("b")})
    slots = np.zeros(1, COUNTERS_RECORD)
    slots[0] = (1, 1, *[0] * 10, NOW_S + 1, 0.0)
    sighting = Sighting(
        fleet=make_fleet_record(),
        roster=roster,
        counters=FleetCounters(now_s=NOW_S, membership=1, epoch=7, slots=slots),
        depth_blocks=np.zeros(256, np.int64),
        taken_s=0.0,
    )
    assert ids(eligible_snapshot(sighting, 10)) == ["a"]


def test_without_leaves_the_failed_out() -> None:
    """A retry does not see who has just failed; when all have, it says so."""
    fleet = snapshot({}, {"reserved_requests": 1}, {})
    rest = without(fleet, {"a", "c"})
    assert (ids(rest), rest.batch_size.tolist(), rest.slot.tolist()) == (["b"], [1], [1])
    with pytest.raises(NoEligibleInstance, match="was tried and failed"):
        without(fleet, {"a", "b", "c"})


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([], None),
        ([None, None], None),
        ([1000.0, None], None),
        ([1000.0, 1230.0, 990.0, None], None),  # equal devices, measured
        ([1000.0, 4000.0], [4000, 1000]),
        ([1000.0, None, 4000.0, 4000.0], [4000, 1000, 1000, 1000]),
        ([1.0, 1e9], [65_535, 1000]),
    ],
)
def test_slowness_is_told_only_of_devices_that_differ(
    rates: list[float | None], expected: list[int] | None
) -> None:
    """Against the fastest; who is not known counts as the median of those that are."""
    told = slowness(rates)
    assert (None if told is None else told.tolist()) == expected
