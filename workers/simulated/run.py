"""Composition root of the simulated engine: options -> objects -> a running server."""

import math
from dataclasses import dataclass
from pathlib import Path

from workers.config import MAX_MODEL_LEN_TOKENS, ConfigError, SimulateConfig
from workers.simulated.completions import ServedModels
from workers.simulated.cost_model import load_profile
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.event_encoding import EventEncoding
from workers.simulated.metrics import EngineMetrics
from workers.simulated.publisher import EventPublisher
from workers.simulated.runtime import EngineRuntime
from workers.simulated.server import EngineServer, serve
from workers.simulated.text import SHIPPED_TOKENIZER, TextModel


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
        )
    )
    publisher = None
    if config.event_endpoint is not None:
        publisher = EventPublisher(
            endpoint=config.event_endpoint,
            replay_endpoint=config.replay_endpoint,
            topic=config.event_topic,
            buffer_steps=config.event_buffer_steps,
        )
    runtime = EngineRuntime(
        engine=engine,
        metrics=EngineMetrics(config.model_name),
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
    server = EngineServer(
        models=models,
        text_model=text_model,
        runtime=runtime,
        publisher=publisher,
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
