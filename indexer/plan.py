"""From what the engine tells and the operator wants to the fleet's shape and the instances."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit

from indexer.config import SidecarConfig
from indexer.contract import keys
from indexer.contract.identifiers import InstanceId
from indexer.contract.limits import BLOCKS_PER_BUCKET_MEAN, BUCKET_BITS_MAX, BUCKET_BITS_MIN
from indexer.contract.records import FleetRecord, InstanceRecord
from indexer.engine.engine_api import EngineInfo
from indexer.engine.engine_metrics import CacheConfig
from indexer.engine.event_source import EventSource, spread
from indexer.errors import EngineUnsuitable

CAPACITY_BLOCKS_ASSUMED: Final = 1 << 16
"""Device blocks of an engine that does not tell; only the number of buckets depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One instance to be.

    Attributes:
        source: of its events.
        record: what routers are told of it.
        reuses_prefixes: whether anything can be learned of it from what it has computed.
        tier_media: media of its events from which it can load; empty: none.
        tier_capacity_tokens: what they hold together; None: nobody tells.
    """

    source: EventSource
    record: InstanceRecord
    reuses_prefixes: bool = True
    tier_media: tuple[str, ...] = ()
    tier_capacity_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One engine process: the fleet to join, and an instance per data-parallel rank.

    Attributes:
        founding: record to found the fleet with, should there be none.
        ranks: at least one.
    """

    founding: FleetRecord
    ranks: tuple[RankPlan, ...]


def plan(
    config: SidecarConfig, engine: EngineInfo, *, prefill_tokens_per_s: float | None = None
) -> Plan:
    """Plan the instances of an engine process; every call draws new instance ids.

    Args:
        config: what the operator wants.
        engine: what it is.
        prefill_tokens_per_s: how fast its device is; None when nobody tells.

    Raises:
        EngineUnsuitable: the engine cannot be indexed as it is; the message says what to change.
    """
    sources = silent_ranks(config, engine) if config.approximate else event_sources(config, engine)
    scope = config.model_scope or engine.models[0]
    caches = [cache_of(config, engine.caches, source.rank) for source in sources]
    records = [
        replace(
            _record(config, engine, source, cache, ranks=len(sources)),
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        for source, cache in zip(sources, caches, strict=True)
    ]
    founding = FleetRecord(
        fleet_id=keys.fleet_id(scope),
        model_scope=scope,
        block_size_tokens=config.block_size_tokens,
        partitions=config.partitions,
        bucket_bits=bucket_bits(config, caches[0]),
        epoch=0,  # each founding draws its own
    )
    ranks = tuple(
        RankPlan(
            source=source,
            record=record,
            reuses_prefixes=cache.reuses_prefixes,
            tier_media=config.tier_media,
            tier_capacity_tokens=config.tier_capacity_tokens,
        )
        for source, record, cache in zip(sources, records, caches, strict=True)
    )
    return Plan(founding=founding, ranks=ranks)


def event_sources(config: SidecarConfig, engine: EngineInfo) -> Sequence[EventSource]:
    """Event sockets by rank: what the engine tells, over it what the operator says."""
    if config.event_endpoint is not None:
        told = engine.sources or ()
        ranks = [source.rank for source in told]
        if config.engine_ranks is not None:
            ranks = list(range(config.engine_ranks))
        elif not ranks:
            ranks = list(range(max(len(engine.caches), 1)))
        topic = config.event_topic
        if topic is None and told:
            topic = told[0].topic
        return spread(
            [
                EventSource(
                    rank=rank,
                    endpoint=config.event_endpoint,
                    replay_endpoint=config.replay_endpoint,
                    topic=topic,
                )
                for rank in ranks
            ]
        )
    if engine.sources is None:
        raise EngineUnsuitable(
            "the engine has no GET /kv_event_sources (it is older than vLLM 0.32, or not vLLM): "
            "tell where its KV events are with --event_endpoint and --replay_endpoint; if it has "
            "none, let routers tell what it computes: --approximate true"
        )
    if not engine.sources:
        raise EngineUnsuitable(
            "the engine publishes no KV events: start vLLM with --kv-events-config "
            '\'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
            '"replay_endpoint": "tcp://*:5558"}\', or do without: --approximate true'
        )
    if config.event_topic is None:
        return engine.sources
    return [replace(source, topic=config.event_topic) for source in engine.sources]


def silent_ranks(config: SidecarConfig, engine: EngineInfo) -> Sequence[EventSource]:
    """Ranks of an engine whose events nobody hears: as many as its metrics tell, or one."""
    told = sorted(int(rank) for rank in engine.caches if rank.isdecimal())
    ranks = range(config.engine_ranks) if config.engine_ranks is not None else told or (0,)
    return [EventSource(rank=rank, endpoint="", replay_endpoint=None, topic=None) for rank in ranks]


def check_block_sizes(engine_tokens: int, fleet_tokens: int) -> None:
    """Refuse an engine whose blocks do not fit the fleet's.

    Raises:
        EngineUnsuitable: neither size divides the other.
    """
    if engine_tokens % fleet_tokens and fleet_tokens % engine_tokens:
        raise EngineUnsuitable(
            f"the engine's blocks of {engine_tokens} tokens do not fit the fleet's canonical "
            f"blocks of {fleet_tokens}: one must divide the other. Found the fleet with another "
            "--block_size_tokens, or give the engine another --block-size"
        )


def bucket_bits(config: SidecarConfig, cache: CacheConfig) -> int:
    """Size of a partition's index, so that its buckets keep their mean when it is full."""
    capacity = cache.capacity_blocks or CAPACITY_BLOCKS_ASSUMED
    blocks = capacity * cache.block_size_tokens * config.instances_expected
    buckets = -(-blocks // (config.block_size_tokens * BLOCKS_PER_BUCKET_MEAN))
    bits: int = (buckets - 1).bit_length()
    return min(max(bits, BUCKET_BITS_MIN), BUCKET_BITS_MAX)


def cache_of(config: SidecarConfig, caches: Mapping[str, CacheConfig], rank: int) -> CacheConfig:
    """The rank's own cache shape, or the only kind there is; over it what the operator says.

    Raises:
        EngineUnsuitable: neither engine nor operator tells the block size.
    """
    told = caches.get(str(rank)) or next(iter(caches.values()), None)
    if config.engine_block_size_tokens is not None:
        size = config.engine_block_size_tokens
        told = (
            CacheConfig(block_size_tokens=size, capacity_blocks=None)
            if told is None
            else replace(told, block_size_tokens=size)
        )
    if told is None and config.approximate:
        told = CacheConfig(block_size_tokens=config.block_size_tokens, capacity_blocks=None)
    if told is None:
        raise EngineUnsuitable(
            "the engine's /metrics has no vllm:cache_config_info: tell how many tokens its blocks "
            "have with --engine_block_size_tokens (and --engine_capacity_blocks, if known)"
        )
    if config.engine_capacity_blocks is not None:
        told = replace(told, capacity_blocks=config.engine_capacity_blocks)
    return told


def _record(
    config: SidecarConfig,
    engine: EngineInfo,
    source: EventSource,
    cache: CacheConfig,
    *,
    ranks: int,
) -> InstanceRecord:
    url = (config.advertised_url or config.engine_url).rstrip("/")
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    nonce = secrets.token_hex(4)
    return InstanceRecord(
        instance_id=InstanceId(f"{host}:{port}/{source.rank}#{nonce}"),
        url=url,
        models=list(engine.models),
        model_root=engine.model_root,
        block_size_tokens=cache.block_size_tokens,
        adapters=list(engine.adapters),
        max_model_len_tokens=engine.max_model_len_tokens,
        capacity_blocks=cache.capacity_blocks,
        data_parallel_rank=source.rank if ranks > 1 else None,
        engine_version=engine.version,
        learned=config.approximate,
        role=config.role,
        tier_tokens_per_s=config.tier_tokens_per_s,
        tier_latency_s=config.tier_latency_s,
        tier_shared=config.tier_shared,
    )
