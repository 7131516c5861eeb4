"""Pure: which processes make a local fleet, with which addresses and command lines."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.config import FleetConfig

SIM_MODEL_DIR = Path(__file__).parents[2] / "workers/simulated/tokenizer"
"""Tokenizer and chat template of the simulated model; engines and routers read the same files."""

ROUTER_CACHE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}
"""The tokenizer is a local folder: nothing is to be fetched, nor looked for, on the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """One engine and its sidecar."""

    engine_url: str
    engine_command: list[str]
    sidecar_url: str
    sidecar_command: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLayout:
    """One router process; several may share a `url`."""

    url: str
    admin_url: str
    command: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLayout:
    """The whole fleet."""

    redis_url: str
    redis_port: int
    router_url: str
    workers: tuple[WorkerLayout, ...]
    routers: tuple[RouterLayout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detours:
    """What lies between the parts, and what they are started with besides the usual.

    Attributes:
        redis_url: where routers and sidecars find Redis; the server itself when not given.
        advertised_urls: by number of the worker, where routers find its engine; the rest directly.
        router_options: of every router, over the usual ones.
        redis_environment: variables of the Redis process.
    """

    redis_url: str | None = None
    advertised_urls: Mapping[int, str] = field(default_factory=dict)
    router_options: Mapping[str, object] = field(default_factory=dict)
    redis_environment: Mapping[str, str] = field(default_factory=dict)


NO_DETOURS = Detours()


def journal_path(config: FleetConfig, number: int | str) -> Path:
    """Where the sidecar of a worker (1, 2, ... or a pattern) writes what it published."""
    return config.run_dir / f"journal-{number}.jsonl"


def role_of(config: FleetConfig, number: int) -> str:
    """Of a worker (0, 1, ...): prefill, decode or both."""
    if not config.prefill_workers:
        return "both"
    return "prefill" if number < config.prefill_workers else "decode"


def lay_out(
    config: FleetConfig, pick_port: Callable[[int], int], detours: Detours = NO_DETOURS
) -> FleetLayout:
    """Lay out a fleet.

    Args:
        config: what is wanted.
        pick_port: gives a free port for a wanted one, each only once.
        detours: what lies between its parts.
    """
    redis_port = pick_port(config.redis_port)
    server_url = f"redis://{config.host}:{redis_port}"
    redis_url = detours.redis_url or server_url
    shared_port = None if config.own_ports else pick_port(config.router_port)
    workers = tuple(
        worker_layout(config, redis_url, number, pick_port, detours.advertised_urls.get(number))
        for number in range(config.workers)
    )
    routers = tuple(
        router_layout(
            config,
            redis_url,
            number,
            pick_port,
            shared_port=shared_port,
            options=detours.router_options,
        )
        for number in range(config.routers)
    )
    return FleetLayout(
        redis_url=server_url,
        redis_port=redis_port,
        router_url=routers[0].url,
        workers=workers,
        routers=routers,
    )


def _program(module: str, *words: str, **options: object) -> list[str]:
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", module, *words, *flags]


def worker_layout(
    config: FleetConfig,
    redis_url: str,
    number: int,
    pick_port: Callable[[int], int],
    advertised_url: str | None = None,
) -> WorkerLayout:
    """Lay out one worker (0, 1, ...); arguments as in `lay_out` and `Detours`."""
    port = pick_port(config.engine_port + number)
    events = pick_port(config.event_port + 2 * number)
    replay = pick_port(config.event_port + 2 * number + 1)
    metrics = pick_port(config.metrics_port + number)
    engine_url = f"http://{config.host}:{port}"
    engine_command = _program(
        "workers",
        "simulate",
        host=config.host,
        port=port,
        model_name=config.model_name,
        profile=config.profile,
        block_size_tokens=config.block_size_tokens,
        capacity_blocks=config.capacity_blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        speedup=config.speedup,
        event_endpoint=f"tcp://*:{events}",  # vLLM's rule: only a wildcard is bound
        replay_endpoint=f"tcp://*:{replay}",
        tokenizer_path=SIM_MODEL_DIR,
        **({"kv_connector": "nixl"} if config.prefill_workers else {}),
    )
    sidecar_command = _program(
        "indexer",
        engine_url=engine_url,
        redis_url=redis_url,
        block_size_tokens=config.block_size_tokens,
        instances_expected=config.workers,
        metrics_host=config.host,
        metrics_port=metrics,
        **({"role": role_of(config, number)} if config.prefill_workers else {}),
        **({"advertised_url": advertised_url} if advertised_url else {}),
        **({"journal_path": journal_path(config, number + 1)} if config.journal else {}),
    )
    return WorkerLayout(
        engine_url=engine_url,
        engine_command=engine_command,
        sidecar_url=f"http://{config.host}:{metrics}",
        sidecar_command=sidecar_command,
    )


def router_layout(
    config: FleetConfig,
    redis_url: str,
    number: int,
    pick_port: Callable[[int], int],
    *,
    shared_port: int | None = None,
    options: Mapping[str, object] = NO_DETOURS.router_options,
) -> RouterLayout:
    """Lay out one router (0, 1, ...); arguments as in `lay_out` and `Detours`.

    Args:
        config: what is wanted.
        redis_url: where it finds Redis.
        number: of this router.
        pick_port: gives a free port for a wanted one.
        shared_port: of all routers; None: it gets one of its own.
        options: over the usual ones.
    """
    port = shared_port or pick_port(config.router_port + number)
    admin_port = pick_port(config.admin_port + number)
    usual: dict[str, object] = {
        "redis_url": redis_url,
        "host": config.host,
        "port": port,
        "reuse_port": "false" if shared_port is None else "true",
        "admin_port": admin_port,
        "policy": config.policy,
        "allow_policy_override": "true",
        "tokenizers": json.dumps({config.model_name: str(SIM_MODEL_DIR)}),
        "drain_notice_s": 0,  # no load balancer needs the time: the port itself is shared
        "drain_deadline_s": config.drain_s,
        "log_level": config.log_level,
    }
    return RouterLayout(
        url=f"http://{config.host}:{port}",
        admin_url=f"http://{config.host}:{admin_port}",
        command=_program("router", **{**usual, **options}),
    )
