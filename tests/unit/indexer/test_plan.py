"""From engine and options to fleet and instances."""

from typing import Any

import pytest

from indexer.config import SidecarConfig
from indexer.engine.engine_api import EngineInfo
from indexer.engine.engine_metrics import CacheConfig
from indexer.engine.event_source import EventSource
from indexer.errors import EngineUnsuitable
from indexer.plan import bucket_bits, check_block_sizes, plan

SOURCE = EventSource(rank=0, endpoint="tcp://*:1", replay_endpoint=None, topic="kv")


def engine(**changes: Any) -> EngineInfo:
    """An engine of one rank."""
    values: dict[str, Any] = {
        "models": ("m", "alias"),
        "model_root": "r",
        "adapters": (),
        "max_model_len_tokens": 4096,
        "sources": (SOURCE,),
        "caches": {"0": CacheConfig(block_size_tokens=16, capacity_blocks=1000)},
        "version": "0.32.0",
    }
    return EngineInfo(**(values | changes))


def test_scope_is_the_first_served_name() -> None:
    """Aliases of one model share its fleet; an option may name it."""
    assert plan(SidecarConfig(), engine()).founding.model_scope == "m"
    assert plan(SidecarConfig(model_scope="x"), engine()).founding.model_scope == "x"


def test_every_plan_draws_new_ids() -> None:
    """A restarted engine is another instance."""
    one, two = (plan(SidecarConfig(), engine()).ranks[0].record.instance_id for _ in range(2))
    assert one != two
    assert one.rpartition("#")[0] == two.rpartition("#")[0] == "127.0.0.1:8000/0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://pod", "pod:80"),
        ("https://pod/", "pod:443"),
        ("http://[fd00::7]:81", "[fd00::7]:81"),
    ],
)
def test_instance_id_names_host_and_port(url: str, shown: str) -> None:
    """The id begins with where routers find the instance."""
    (rank,) = plan(SidecarConfig(advertised_url=url), engine()).ranks
    assert rank.record.instance_id.startswith(f"{shown}/0#")


def test_one_rank_needs_no_pin() -> None:
    """The rank is told to routers only when there are several."""
    assert plan(SidecarConfig(), engine()).ranks[0].record.data_parallel_rank is None


def test_old_engine_needs_the_endpoint() -> None:
    """Without discovery the error names the options."""
    with pytest.raises(EngineUnsuitable, match="--event_endpoint"):
        plan(SidecarConfig(), engine(sources=None))


def test_events_switched_off() -> None:
    """The error shows how to switch them on."""
    with pytest.raises(EngineUnsuitable, match="--kv-events-config"):
        plan(SidecarConfig(), engine(sources=()))


def test_operator_endpoints_spread_over_the_ranks() -> None:
    """Ranks of an old engine follow from its metrics, their ports from the first one's."""
    cache = CacheConfig(block_size_tokens=16, capacity_blocks=1000)
    config = SidecarConfig(event_endpoint="tcp://*:10", replay_endpoint="tcp://*:20")
    ranks = plan(config, engine(sources=None, caches={"0": cache, "1": cache})).ranks
    assert [
        (rank.source.endpoint, rank.source.replay_endpoint, rank.source.topic) for rank in ranks
    ] == [("tcp://*:10", "tcp://*:20", None), ("tcp://*:11", "tcp://*:21", None)]
    assert [rank.record.data_parallel_rank for rank in ranks] == [0, 1]


def test_engine_of_another_make_is_described_by_its_operator() -> None:
    """Block size, capacity and ranks of an engine without vLLM's metrics come from options."""
    config = SidecarConfig(
        event_endpoint="tcp://*:10",
        engine_block_size_tokens=32,
        engine_capacity_blocks=500,
        engine_ranks=2,
    )
    ranks = plan(config, engine(sources=None, caches={}, version=None)).ranks
    assert [rank.source.endpoint for rank in ranks] == ["tcp://*:10", "tcp://*:11"]
    assert {(rank.record.block_size_tokens, rank.record.capacity_blocks) for rank in ranks} == {
        (32, 500)
    }


def test_operator_wins_over_the_engines_metrics() -> None:
    """A block size that an engine advertises wrongly can be corrected; the rest is kept."""
    (rank,) = plan(SidecarConfig(engine_block_size_tokens=128), engine()).ranks
    assert (rank.record.block_size_tokens, rank.record.capacity_blocks) == (128, 1000)


def test_unknown_block_size_is_asked_for() -> None:
    """Where neither engine nor operator tells it, the error names the option."""
    with pytest.raises(EngineUnsuitable, match="--engine_block_size_tokens"):
        plan(SidecarConfig(event_endpoint="tcp://*:10"), engine(sources=None, caches={}))


@pytest.mark.parametrize(
    ("capacity", "engine_tokens", "fleet_tokens", "instances", "bits"),
    [
        (1024, 16, 16, 64, 10),  # 65,536 blocks in buckets of 64
        (1025, 16, 16, 64, 11),
        (1024, 64, 16, 64, 12),
        (1024, 16, 64, 64, 8),
        (1, 16, 16, 1, 4),
        (10**9, 16, 16, 64, 24),
        (None, 16, 16, 1, 10),
    ],
)
def test_bucket_bits(
    capacity: int | None, engine_tokens: int, fleet_tokens: int, instances: int, bits: int
) -> None:
    """A full partition has 64 blocks a bucket on average, within the contract's bounds."""
    config = SidecarConfig(block_size_tokens=fleet_tokens, instances_expected=instances)
    cache = CacheConfig(block_size_tokens=engine_tokens, capacity_blocks=capacity)
    assert bits == bucket_bits(config, cache)


def test_block_sizes() -> None:
    """One size must divide the other; the error names both and the options on either side."""
    for engine_tokens, fleet_tokens in ((16, 16), (64, 16), (16, 64), (1, 16), (784, 16)):
        check_block_sizes(engine_tokens, fleet_tokens)
    for engine_tokens, fleet_tokens in ((48, 32), (24, 16), (16, 24)):
        match = rf"{engine_tokens} .* {fleet_tokens}.*--block_size_tokens.*--block-size"
        with pytest.raises(EngineUnsuitable, match=match):
            check_block_sizes(engine_tokens, fleet_tokens)


def test_without_events_ranks_come_from_the_metrics() -> None:
    """Or there is one; block size and KV$ as told, else the fleet's blocks and no size."""
    config = SidecarConfig(approximate=True)
    shape = CacheConfig(block_size_tokens=32, capacity_blocks=7)
    two = plan(config, engine(sources=None, caches={"1": shape, "0": shape})).ranks
    assert [one.record.data_parallel_rank for one in two] == [0, 1]
    assert {(one.record.learned, one.record.block_size_tokens) for one in two} == {(True, 32)}
    (bare,) = plan(config, engine(sources=None, caches={})).ranks
    told = bare.record.block_size_tokens, bare.record.capacity_blocks, bare.record.learned
    assert told == (16, None, True)


def test_an_operator_who_tells_the_block_size_hides_nothing_else() -> None:
    """Of an engine that reuses nothing nothing is learned, and its KV$ is as large as it says."""
    config = SidecarConfig(approximate=True, engine_block_size_tokens=32)
    shape = CacheConfig(block_size_tokens=16, capacity_blocks=7, reuses_prefixes=False)
    (one,) = plan(config, engine(sources=None, caches={"0": shape})).ranks
    told = one.record.block_size_tokens, one.record.capacity_blocks, one.reuses_prefixes
    assert told == (32, 7, False)


def test_events_are_followed_unless_told_otherwise() -> None:
    """An engine without any is refused, with what to do about it."""
    assert not plan(SidecarConfig(), engine()).ranks[0].record.learned
    assert plan(SidecarConfig(approximate=True), engine()).ranks[0].record.learned
    for sources in (None, ()):
        with pytest.raises(EngineUnsuitable, match="--approximate true"):
            plan(SidecarConfig(), engine(sources=sources))
