"""Fixtures of the contract tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.embedded_server import EmbeddedServer


@pytest.fixture(scope="module")
def server(redis_socket: Path) -> Iterator[EmbeddedServer]:
    """The embedded server with the functions loaded; a test clears the data first."""
    server = EmbeddedServer(redis_socket)
    server.load()
    yield server
    server.redis.close()
