"""Fixtures of the integration tests."""

import pytest
import redis.asyncio
from sidecar_run import Probe


@pytest.fixture
def probe(redis_client: redis.asyncio.Redis) -> Probe:
    """The embedded server, empty."""
    return Probe(redis_client)
