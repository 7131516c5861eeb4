"""Heartbeats are as many as one server takes, and never too few for a lease."""

import pytest

from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import HEARTBEATS_PER_S_MAX, INSTANCE_LEASE_RENEW_S
from indexer.contract.records import HeartbeatReply, SlotFlag
from indexer.pace import Pace

AWAKE = SlotFlag(0)


def beaten(slots: int, *awaited: bytes) -> Pace:
    """After a heartbeat at 100 s that was answered."""
    pace = Pace()
    assert pace.is_due(100.0, AWAKE), "the first one is"
    reply = HeartbeatReply(
        reserved_requests=0,
        reserved_prefill_tokens=0,
        budget_blocks=None,
        now_s=0.0,
        notices=(),
        awaited=tuple(BlockHash(block) for block in awaited),
        fleet_instances_count=slots,
    )
    pace.heard(100.0, AWAKE, reply)
    return pace


@pytest.mark.parametrize("slots", [1, 16, 1000, 4096])
def test_a_fleet_beats_no_more_often_than_one_server_takes(slots: int) -> None:
    """The interval grows with the fleet, up to what the lease needs."""
    pace = beaten(slots)
    interval_s = min(slots / HEARTBEATS_PER_S_MAX, INSTANCE_LEASE_RENEW_S)
    assert not pace.is_due(100.0 + 0.99 * interval_s, AWAKE)
    assert pace.is_due(100.001 + interval_s, AWAKE)


def test_news_does_not_wait() -> None:
    """A change of state, an awaited block and a heartbeat that failed are followed at once."""
    assert beaten(1000).is_due(100.0, SlotFlag.DRAINING)
    assert beaten(1000, b"12345678").is_due(100.0, AWAKE)
    failed = beaten(1000)
    failed.lost()
    assert failed.is_due(100.0, AWAKE)
