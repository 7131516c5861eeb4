"""Pure: which processes make a local fleet, with which addresses and command lines."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
    """One router process."""

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


def journal_path(config: FleetConfig, number: int | str) -> Path:
    """Where the sidecar of a worker (1, 2, ... or a pattern) writes what it published."""
    return config.run_dir / f"journal-{number}.jsonl"


def lay_out(config: FleetConfig, pick_port: Callable[[int], int]) -> FleetLayout:
    """Lay out a fleet.

    Args:
        config: what is wanted.
        pick_port: gives a free port for a wanted one, each only once.
    """
    redis_port = pick_port(config.redis_port)
    redis_url = f"redis://{config.host}:{redis_port}"
    router_port = pick_port(config.router_port)
    return FleetLayout(
        redis_url=redis_url,
        redis_port=redis_port,
        router_url=f"http://{config.host}:{router_port}",
        workers=tuple(
            _worker(config, redis_url, number, pick_port) for number in range(config.workers)
        ),
        routers=tuple(
            _router(config, redis_url, router_port, pick_port(config.admin_port + number))
            for number in range(config.routers)
        ),
    )


def _program(module: str, *words: str, **options: object) -> list[str]:
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", module, *words, *flags]


def _worker(
    config: FleetConfig, redis_url: str, number: int, pick_port: Callable[[int], int]
) -> WorkerLayout:
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
    )
    sidecar_command = _program(
        "indexer",
        engine_url=engine_url,
        redis_url=redis_url,
        block_size_tokens=config.block_size_tokens,
        instances_expected=config.workers,
        metrics_host=config.host,
        metrics_port=metrics,
        **({"journal_path": journal_path(config, number + 1)} if config.journal else {}),
    )
    return WorkerLayout(
        engine_url=engine_url,
        engine_command=engine_command,
        sidecar_url=f"http://{config.host}:{metrics}",
        sidecar_command=sidecar_command,
    )


def _router(config: FleetConfig, redis_url: str, port: int, admin_port: int) -> RouterLayout:
    command = _program(
        "router",
        redis_url=redis_url,
        host=config.host,
        port=port,
        reuse_port="true",
        admin_port=admin_port,
        policy=config.policy,
        allow_policy_override="true",
        tokenizers=json.dumps({config.model_name: str(SIM_MODEL_DIR)}),
        drain_notice_s=0,  # no load balancer needs the time: the port itself is shared
        drain_deadline_s=config.drain_s,
        log_level=config.log_level,
    )
    return RouterLayout(admin_url=f"http://{config.host}:{admin_port}", command=command)
