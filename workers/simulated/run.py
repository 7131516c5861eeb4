"""Composition root of the simulated engine: options -> objects -> a running server."""

import math
from dataclasses import dataclass
from pathlib import Path

from workers.config import MAX_MODEL_LEN_TOKENS, ConfigError, SimulateConfig
from workers.simulated.completions import ServedModels
from workers.simulated.cost_model import Profile, load_profile
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.event_encoding import EventEncoding
from workers.simulated.eviction.policies import eviction_order
from workers.simulated.kv_transfer import KvKeeper, TransferOptions
from workers.simulated.metrics import EngineMetrics
from workers.simulated.publisher import EventPublisher
from workers.simulated.runtime import EngineRuntime
from workers.simulated.server import EngineServer, serve
from workers.simulated.text import SHIPPED_TOKENIZER, TextModel
from workers.simulated.tier import KvTier, TierConfig

TIER_MEDIUM = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The objects of one instance, wired together and not yet running."""

    runtime: EngineRuntime
    publisher: EventPublisher | None
    server: EngineServer


def build(config: SimulateConfig) -> Parts:
    """Make the objects; the event sockets are open afterwards.

    Raises:
        ConfigError: options contradict each other.
        ProfileError, TextModelError: a named profile or tokenizer cannot be used.
        EventPublisherError: an event endpoint cannot be used.
    """
    profile = load_profile(config.profile)
    capacity_blocks = config.capacity_blocks or profile.capacity_tokens // config.block_size_tokens
    context_tokens = _context_tokens(config, capacity_blocks)
    path = config.tokenizer_path
    text_model = TextModel(Path(path) if path else SHIPPED_TOKENIZER)
    engine = Engine(
        EngineConfig(
            cost=profile.cost,
            block_size_tokens=config.block_size_tokens,
            capacity_blocks=capacity_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            output_ids=text_model.output_ids,
        ),
        _tier(config, profile),
        eviction_order(config.eviction, capacity_blocks),
    )
    publisher = None
    if config.event_endpoint is not None:
        publisher = EventPublisher(
            endpoint=config.event_endpoint,
            replay_endpoint=config.replay_endpoint,
            topic=config.event_topic,
            buffer_steps=config.event_buffer_steps,
        )
    metrics = EngineMetrics(config.model_name)
    keeper = _keeper(config, profile, engine) if config.kv_connector is not None else None
    runtime = EngineRuntime(
        engine=engine,
        metrics=metrics,
        publisher=publisher,
        encoding=EventEncoding(config.event_encoding),
        speedup=config.speedup,
        waiting_max=config.max_num_queued_reqs,
    )
    models = ServedModels(
        model_name=config.model_name,
        adapter_names=config.adapter_names,
        max_model_len_tokens=context_tokens,
        default_max_tokens=config.default_max_tokens,
    )
    metrics.taking_count = lambda: keeper.taking_count if keeper is not None else 0
    server = EngineServer(
        models=models,
        text_model=text_model,
        runtime=runtime,
        publisher=publisher,
        keeper=keeper,
        api_key=config.api_key,
    )
    return Parts(runtime=runtime, publisher=publisher, server=server)


async def run(config: SimulateConfig) -> None:
    """Serve until told to stop.

    Raises:
        OSError: the port cannot be bound; and what `build` and `serve` raise.
    """
    parts = build(config)
    await serve(
        server=parts.server,
        runtime=parts.runtime,
        publisher=parts.publisher,
        host=config.host,
        port=config.port,
        shutdown_timeout_s=config.shutdown_timeout_s,
    )


def _tier(config: SimulateConfig, profile: Profile) -> KvTier | None:
    if config.tier_capacity_blocks is None:
        return None
    options = TierConfig(
        capacity_blocks=config.tier_capacity_blocks,
        tokens_per_s=config.tier_bytes_per_s / profile.kv_bytes_per_token,
        latency_s=config.tier_latency_s,
    )
    return KvTier(options, medium=TIER_MEDIUM)


def _keeper(config: SimulateConfig, profile: Profile, engine: Engine) -> KvKeeper:
    options = TransferOptions(
        bytes_per_s=config.kv_transfer_bytes_per_s,
        latency_s=config.kv_transfer_latency_s,
        bytes_per_token=profile.kv_bytes_per_token,
        lease_s=config.kv_lease_duration_s,
        recompute=config.kv_load_failure_policy == "recompute",
        speedup=config.speedup,
    )
    return KvKeeper(options, engine.release_kept)


def _context_tokens(config: SimulateConfig, capacity_blocks: int) -> int:
    """Longest prompt and answer together; like vLLM, one request must fit the blocks alone."""
    held_tokens: int = capacity_blocks * config.block_size_tokens
    wanted: int | None = config.max_model_len_tokens
    if wanted is None:
        return min(MAX_MODEL_LEN_TOKENS, held_tokens)
    if wanted > held_tokens:
        needed = math.ceil(wanted / config.block_size_tokens)
        raise ConfigError(
            f"max_model_len_tokens {wanted} needs {needed} blocks of {config.block_size_tokens} "
            f"tokens; raise capacity_blocks ({capacity_blocks}) or lower max_model_len_tokens"
        )
    return wanted
