"""The processes around real engines, and how tests talk to them."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp

from deploy.local import embedded_redis
from deploy.local.part import Part
from tests.vllm.settings import HOST, RUN_DIR


def part(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path = RUN_DIR,
) -> Part:
    """A process that logs to a file of its name."""
    path = folder / f"{name}.log"
    return Part(name=name, command=command, log_path=path, environment=environment or {})


def program(module: str, **options: object) -> list[str]:
    """A command of ours."""
    return [sys.executable, "-m", module, *(f"--{key}={value}" for key, value in options.items())]


def redis_part(port: int, *, folder: Path = RUN_DIR) -> Part:
    """A server that keeps nothing."""
    command = embedded_redis.command(host=HOST, port=port, directory=folder)
    return part("redis", command, folder=folder)


def router_part(name: str, redis_url: str, port: int, *, folder: Path = RUN_DIR) -> Part:
    """A router that tells categories and ends soon when it is asked to."""
    command = program(
        "router",
        redis_url=redis_url,
        host=HOST,
        port=port,
        drain_notice_s=0,
        drain_deadline_s=2,
        tell_category="true",
    )
    return part(name, command, {"HF_HUB_OFFLINE": "1"}, folder=folder)


def session_without_pool() -> aiohttp.ClientSession:
    """Engines close idle connections after 5 s, which a request may find out too late."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=120),
        connector=aiohttp.TCPConnector(force_close=True),
    )
