"""One engine process is told from the next where no events are."""

from collections.abc import Sequence

import pytest

from indexer.approximate.no_events import NoEvents
from indexer.contract.records import EngineCounters
from indexer.engine.engine_metrics import EngineSample, RequestTotals
from indexer.errors import EngineRestarted
from indexer.table.holdings import Holdings

AWAY = None


def sample(*, started_s: float | None = None, first_tokens: int | None = None) -> EngineSample:
    """Idle."""
    totals = first_tokens is not None and RequestTotals(
        first_tokens_count=first_tokens, ended_count=first_tokens
    )
    return EngineSample(
        counters=EngineCounters(running_count=0, waiting_count=0, kv_usage_ratio=0.0),
        sleep_level=None,
        totals=totals or None,
        started_s=started_s,
    )


@pytest.mark.parametrize(
    ("seen", "restarted"),
    [
        ([sample(started_s=10.0), AWAY, sample(started_s=10.2)], False),
        ([sample(started_s=10.0), sample(started_s=20.0)], True),
        ([sample(first_tokens=3), AWAY, sample(first_tokens=3)], False),
        ([sample(first_tokens=3), sample(first_tokens=2)], True),
        ([sample(), sample()], False),
        ([sample(), AWAY, sample()], True),
        ([sample(started_s=10.0, first_tokens=3), AWAY, sample(started_s=10.0)], False),
    ],
)
def test_restarts_show(seen: Sequence[EngineSample | None], restarted: bool) -> None:
    """By start time, else by counts, else by having been away."""
    holdings = Holdings(model_scope="m", block_size_tokens=16, capacity_blocks=10)
    no_events = NoEvents(holdings)
    *before, last = seen
    for one in before:
        if one is AWAY:
            no_events.check()
        else:
            no_events.look(one)
    if restarted:
        with pytest.raises(EngineRestarted):
            no_events.look(last)
    else:
        no_events.look(last)
