"""The generated workloads of the command line, by name."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from loadgen.config import GenerateConfig
from loadgen.generate import ChatWorkload, generate
from loadgen.trace_row import TraceRow
from loadgen.workloads.agents import generate_agents
from loadgen.workloads.cache_mix import API_MIX, CHAT_MIX, CacheMix, generate_mix
from loadgen.workloads.hot_prefix import generate_hot_prefix


def generated_rows(config: GenerateConfig) -> tuple[TraceRow, ...]:
    """The rows that `generate` writes, in order of arrival. Raises WorkloadError."""
    count, seed = config.requests_count, config.seed

    def chat() -> tuple[TraceRow, ...]:
        names = {f.name for f in fields(ChatWorkload)}
        return generate(ChatWorkload(**{k: v for k, v in vars(config).items() if k in names}))

    def mix(shape: CacheMix) -> Iterator[TraceRow]:
        if config.mix_session_rate is not None:
            shape = replace(shape, session_rate=config.mix_session_rate)
        return generate_mix(shape, requests_count=count, seed=seed)

    makers: dict[str, Callable[[], Iterator[TraceRow] | tuple[TraceRow, ...]]] = {
        "chat": chat,
        "chat_mix": lambda: mix(CHAT_MIX),
        "api_mix": lambda: mix(API_MIX),
        "hot_prefix": lambda: generate_hot_prefix(
            config.hot_prefix, requests_count=count, seed=seed
        ),
        "agents": lambda: generate_agents(config.agents, requests_count=count, seed=seed),
    }
    return tuple(makers[config.workload]())
