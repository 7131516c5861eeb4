"""What a rank takes of the notices it gets."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgpack
import pytest
from builders import make_instance
from prometheus_client import CollectorRegistry

from indexer.approximate.learner import LEARNED_BLOCKS_ASSUMED, LEARNED_BLOCKS_MAX, Learner
from indexer.contract.records import EngineCounters, InstanceRecord, Notice
from indexer.engine.engine_metrics import EngineSample
from indexer.table.changes import Delta
from indexer.table.holdings import Holdings
from indexer.telemetry import Telemetry

NOTICE = Notice(
    decided_s=1.0, predicted_tokens=0, actual_tokens=0, hashes=bytes(range(32)), computed=True
)
HOLDINGS = Holdings(model_scope="m", block_size_tokens=16, capacity_blocks=10)


@dataclass
class Told:
    """In place of the publisher: what it is to publish."""

    deltas: list[Delta] = field(default_factory=list)

    def offer(self, deltas: list[Delta], _: float | None) -> None:
        """Note them."""
        self.deltas += [delta for delta in deltas if delta.added or delta.removed]


def learner(told: Told, record: InstanceRecord | None = None, *, reuses: bool = True) -> Learner:
    """Of a rank with a KV$ of four blocks."""
    return Learner(
        cast("Any", told),
        Telemetry(CollectorRegistry()),
        rank="0",
        record=record or make_instance(capacity_blocks=4),
        reuses_prefixes=reuses,
        block_size_tokens=16,
    )


def sample(computed_tokens: int | None) -> EngineSample:
    """Idle."""
    counters = EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0)
    return EngineSample(counters=counters, sleep_level=None, computed_tokens=computed_tokens)


def test_reports_that_differ_are_left_to_their_judge() -> None:
    """And so is what cannot be read."""
    told = Told()
    report = replace(NOTICE, computed=False, actual_tokens=16).encode()
    assert learner(told).take([report, NOTICE.encode(), b"\xc1"]) == [report, b"\xc1"]
    assert [len(delta.added) for delta in told.deltas] == [4]


@pytest.mark.parametrize(
    "changes",
    [{"hashes": b""}, {"hashes": b"x"}, {"hashes": 7}, {"hashes": "h" * 8}, {"first_block": -1},
     {"first_block": True}, {"first_block": 1 << 40}, {"first_block": None},
     {"hashes": bytes(8 * ((1 << 14) + 1))}],
)  # fmt: skip
def test_what_no_router_says_is_not_learned(changes: dict[str, Any]) -> None:
    """Whoever may write to Redis may have said it."""
    told = Told()
    values = msgpack.unpackb(NOTICE.encode()) | changes
    assert learner(told).take([msgpack.packb(values)]) == []
    assert told.deltas == []


def test_it_is_forgotten_when_the_engine_has_computed_its_kv_cache_full() -> None:
    """By the engine's own count, whoever asked for it; a count that begins anew adds nothing."""
    told = Told()
    one = learner(told)
    one.look(sample(1000), HOLDINGS)
    one.take([NOTICE.encode()])
    for computed_tokens in (1000 + 4 * 16 - 1, 10, None, 500, 500):
        one.look(sample(computed_tokens), HOLDINGS)
    assert len(one.blocks) == 4
    one.look(sample(501), HOLDINGS)
    assert len(one.blocks) == 0
    assert told.deltas[-1].removed == list(reversed(told.deltas[0].added))


def test_as_much_is_learned_as_the_engine_can_hold() -> None:
    """Nothing of one that reuses nothing; in canonical blocks; never without a bound."""
    told = Told()
    assert learner(told, reuses=False).blocks.blocks_max == 0
    assert learner(told, reuses=False).take([NOTICE.encode()]) == []
    assert told.deltas == []
    for capacity, size, expected in (
        (10, 32, 20),
        (None, 16, LEARNED_BLOCKS_ASSUMED),
        (1 << 30, 16, LEARNED_BLOCKS_MAX),
    ):
        record = make_instance(capacity_blocks=capacity, block_size_tokens=size)
        assert learner(told, record).blocks.blocks_max == expected
