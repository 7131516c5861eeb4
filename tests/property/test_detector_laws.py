"""Laws of the detector: whom it takes out, when, and whom it takes back; over the twin of Redis."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from builders import make_snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from xxhash import xxh3_64_digest

from indexer.contract.limits import CLASS_WINDOW_S, CLASSES_MAX
from indexer.contract.request_classes import ClassPrefixes, RecentClasses, Standing
from loadgen.simulation.shared_classes import SharedClasses
from router.detector import (
    REQUESTS_PER_INSTANCE_LEAST,
    SHARE_LEAST,
    STREAK_PER_HOLDER,
    Detection,
    detect,
)
from router.snapshot import FleetSnapshot

BLOCK = 16
DEPTH = 8
"""Blocks of the hot prefix."""


def prompt(prefix: int, number: int) -> ClassPrefixes:
    """Prefixes of a prompt of 16 blocks, DEPTH of which are a prefix of this number."""
    names = [(prefix, block) if block < DEPTH else (number, -block) for block in range(16)]
    return ClassPrefixes.of(b"".join(xxh3_64_digest(repr(name).encode()) for name in names))


@cache
def _idle(count: int) -> FleetSnapshot:
    return make_snapshot(16 * BLOCK, hit_tokens=[0] * count)


def fleet(depth_blocks: list[int]) -> FleetSnapshot:
    """Instances that hold so many leading blocks of a prompt."""
    return replace(_idle(len(depth_blocks)), depth_tokens=np.array(depth_blocks) * BLOCK)


def recent(requests: float, counts: list[float], standing: Standing) -> RecentClasses:
    """All classes of this standing."""
    return RecentClasses(
        requests=requests,
        counts=np.array(counts),
        standings=np.full(len(counts), int(standing), np.uint8),
    )


counts_of = st.lists(st.floats(0, 1200), min_size=5, max_size=5)
depths_of = st.lists(st.integers(0, 16), min_size=1, max_size=12)


@given(
    depths=depths_of,
    counts=counts_of,
    requests=st.floats(0, 1000),
    standing=st.sampled_from(Standing),
)
def test_an_alarm_is_the_condition_and_nothing_else(
    depths: list[int], counts: list[float], requests: float, standing: Standing
) -> None:
    """Over a frequent class's own prefix, x / (1 - x) > M / M'; and somebody is left.

    Holders are taken out where Redis says so and the condition holds, else nobody is; the others
    are all candidates, and a snapshot of other instances never becomes empty.
    """
    snapshot = fleet(depths)
    prefixes = prompt(0, 0)
    found = detect(prefixes, recent(requests, counts, standing), snapshot, pool=0)
    hot = found.hot_class
    if hot is not None:
        level = hot.depth_blocks.bit_length() - 1
        share = min([*counts[: level + 1], requests]) / requests
        assert hot.share == pytest.approx(share)
        assert share > max(1 / len(depths), SHARE_LEAST)
        assert requests >= REQUESTS_PER_INSTANCE_LEAST * len(depths)
        holders = [slot for slot, depth in enumerate(depths) if depth >= hot.depth_blocks]
        others = len(depths) - len(holders)
        assert list(hot.holders) == holders
        wanted = bool(holders) and others > 0 and share * others > (1 - share) * len(holders)
        assert hot.alarm is wanted
        assert hot.taken_out is (wanted and standing is Standing.TAKEN_OUT)
        assert (hot.prefix == prefixes.name(level)) is True
    left = set(found.candidates(snapshot).slot.tolist())
    everybody = set(range(len(depths)))
    assert left == (everybody - set(hot.holders) if hot and hot.taken_out else everybody)
    assert left


@given(depths=depths_of, taken=st.sets(st.integers(0, 11)))
def test_who_alone_is_left_stays(depths: list[int], taken: set[int]) -> None:
    """Of a snapshot with nobody but holders, as after others have gone, none is taken out."""
    full = fleet(depths)
    some = detect(prompt(0, 0), recent(1000, [900.0] * 5, Standing.TAKEN_OUT), full, pool=0)
    hot = some.hot_class
    holders = tuple(sorted(taken & set(range(len(depths)))))
    if hot is None or not holders:
        return
    found = replace(some, hot_class=replace(hot, holders=holders, alarm=True, taken_out=True))
    left = set(found.candidates(full).slot.tolist())
    assert left == (set(range(len(depths))) - set(holders) or set(range(len(depths))))


@pytest.mark.parametrize("depths", [[16] * 4, [0] * 4])
def test_all_or_nobody_holds_it_is_no_trouble(depths: list[int]) -> None:
    """M' or M empty."""
    found = detect(
        prompt(0, 0), recent(100, [100.0] * 5, Standing.TAKEN_OUT), fleet(depths), pool=0
    )
    assert found.hot_class is not None
    assert not found.hot_class.alarm


@given(
    depths=depths_of,
    named=st.integers(0, 2),
    asked=st.none() | st.integers(0, 2),
    standing=st.sampled_from(Standing),
)
def test_one_pool_is_not_judged_by_who_holds_what_in_another(
    depths: list[int], named: int, asked: int | None, standing: Standing
) -> None:
    """The request counts in the pool that was named; nobody is left out, and nothing ends.

    Named by the roles as last known; asked is who is eligible.
    """
    chain = b"".join(xxh3_64_digest(b"%d" % block) for block in range(16))
    prefixes, snapshot = ClassPrefixes.of(chain, named), fleet(depths)
    told = recent(1000, [900.0] * len(prefixes), standing)
    found = detect(prefixes, told, snapshot, pool=asked)
    report = found.report(snapshot.slot)
    assert report.prefixes == prefixes
    if asked == named:
        hot = found.hot_class
        assert (hot is None) == (len(depths) == 1)  # to whom nothing can be too much
        told_so = hot is not None and (hot.alarm or standing is not Standing.QUIET)
        assert (report.verdict is not None) == told_so
    else:
        assert (found.hot_class, report.verdict) == (None, None)
        assert found.candidates(snapshot) is snapshot


class Fleet(RuleBasedStateMachine):
    """Requests of two hot prefixes and of fresh ones, sent where the machine likes, over time."""

    INSTANCES = 6

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.now_s, self.number = SharedClasses(), 1000.0, 0
        self.holders: dict[int, set[int]] = {0: {0}, 1: {1}}
        self.streak: dict[bytes, int] = {}
        self.out: set[bytes] = set()

    def look(self, prefix: int) -> tuple[Detection, FleetSnapshot]:
        """What a router finds about the next request."""
        self.number += 1
        hot = prefix in self.holders
        prefixes = prompt(prefix if hot else 100 + self.number, self.number)
        held = self.holders.get(prefix, set())
        snapshot = fleet([DEPTH if slot in held else 0 for slot in range(self.INSTANCES)])
        told = RecentClasses.decode(self.classes.recent(prefixes, self.now_s))
        return detect(prefixes, told, snapshot, pool=0), snapshot

    def send(self, prefix: int, wish: int) -> None:
        """One request: booked on the wished candidate, who then holds its prefix."""
        found, snapshot = self.look(prefix)
        slots = found.candidates(snapshot).slot
        slot = int(slots[wish % len(slots)])
        report = found.report(slots)
        hot = found.hot_class
        if hot is not None:
            self.check(found, lower=slot in hot.holders)
        self.classes.count(report.prefixes, self.now_s)
        if report.verdict is not None:
            lower = report.holder_flags[slots.tolist().index(slot)] == 1
            self.classes.judge(report.verdict, self.now_s, lower=lower)
        self.holders.get(prefix, set()).add(slot)

    def check(self, found: Detection, *, lower: bool) -> None:
        """Taken out only after the streak, and never once the condition has ceased."""
        hot = found.hot_class
        assert hot is not None
        if not hot.alarm:
            self.out.discard(hot.prefix)
            self.streak.pop(hot.prefix, None)
            return
        assert hot.taken_out == (hot.prefix in self.out)
        if hot.taken_out:
            assert not lower
            return
        streak = self.streak.get(hot.prefix, 0) + 1 if lower else 0
        self.streak[hot.prefix] = streak
        if streak >= STREAK_PER_HOLDER * len(hot.holders):
            self.out.add(hot.prefix)

    @rule(prefix=st.integers(0, 5), wishes=st.lists(st.integers(0, 5), min_size=1, max_size=8))
    def burst(self, prefix: int, wishes: list[int]) -> None:
        """Requests that begin alike (0, 1), or each in its own way."""
        for wish in wishes:
            self.now_s += 0.05
            self.send(prefix, wish)

    @rule(prefix=st.integers(0, 1), count=st.integers(1, 30))
    def stubborn(self, prefix: int, count: int) -> None:
        """All go to the first candidate."""
        for _ in range(count):
            self.now_s += 0.05
            self.send(prefix, 0)

    @rule(prefix=st.integers(0, 1), slot=st.integers(0, 5))
    def evict(self, prefix: int, slot: int) -> None:
        """One holder forgets the prefix, unless it is the last."""
        if len(self.holders[prefix]) > 1:
            self.holders[prefix].discard(slot)

    @rule()
    def rest(self) -> None:
        """Nobody asks for longer than a state says something."""
        self.now_s += 2 * CLASS_WINDOW_S + 1
        self.out.clear()
        self.streak.clear()

    @invariant()
    def bounded(self) -> None:
        """Whatever has come: two windows of counters, and so many states."""
        assert len(self.classes._windows) <= 2
        assert len(self.classes.states) <= CLASSES_MAX


TestFleet = Fleet.TestCase
TestFleet.settings = settings(stateful_step_count=20)


def test_only_requests_in_a_row_take_holders_out() -> None:
    """One that goes elsewhere ends the streak, and makes another holder: then it takes four."""
    play = Fleet()
    for prefix in (*[0] * 10, *[9] * 20):
        play.send(prefix, 0)
    outcomes = []
    for wish in (0, 3, 0, 0, 0, 0, 0):
        found, _ = play.look(0)
        assert found.hot_class is not None
        outcomes.append((len(found.hot_class.holders), found.hot_class.standing))
        play.send(0, wish)
    assert outcomes == [*[(1, "watched")] * 2, *[(2, "watched")] * 4, (2, "taken_out")]


def test_each_pool_is_judged_by_its_own_requests_and_instances() -> None:
    """One prefix in two pools: hot in the first, whose streak nothing of the second ends.

    Of the first pool's requests two thirds are of the class, of the fleet's a third. In the second
    pool nobody holds it, and each of its requests finds it over.
    """
    classes, now_s, number = SharedClasses(), 1000.0, 0

    def send(prefix: int, pool: int, depths: list[int], slot: int) -> Detection:
        nonlocal number, now_s
        number, now_s = number + 1, now_s + 0.01
        chain = [(prefix, b) if b < DEPTH else (number, -b) for b in range(16)]
        hashes = b"".join(xxh3_64_digest(repr(name).encode()) for name in chain)
        prefixes = ClassPrefixes.of(hashes, pool)
        told = RecentClasses.decode(classes.recent(prefixes, now_s))
        found = detect(prefixes, told, fleet(depths), pool=pool)
        slots = found.candidates(fleet(depths)).slot
        report = found.report(slots)
        classes.count(report.prefixes, now_s)
        if report.verdict is not None:
            taken = slots.tolist().index(slot) if slot in slots else 0
            classes.judge(report.verdict, now_s, lower=report.holder_flags[taken] == 1)
        return found

    held, nobody = [DEPTH, 0, 0, 0], [0, 0, 0, 0]
    for round_ in range(30):
        for _ in range(2):
            send(0, 1, held, 0)
        send(100 + round_, 1, held, 1)
        for other in range(3):
            send(0 if round_ % 10 == 0 else 200 + 3 * round_ + other, 2, nobody, other)
    first = send(0, 1, held, 0).hot_class
    second = send(0, 2, nobody, 1).hot_class
    assert first is not None
    assert first.share == pytest.approx(2 / 3, rel=0.02)
    assert first.taken_out
    assert second is None or not second.alarm
