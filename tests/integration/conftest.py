"""Fixtures of the integration tests."""

from collections.abc import Iterator

import pytest
import redis.asyncio
from redis_servers import RedisCluster, redis_cluster
from sidecar_run import Probe


@pytest.fixture
def probe(redis_client: redis.asyncio.Redis) -> Probe:
    """The embedded server, empty."""
    return Probe(redis_client)


@pytest.fixture(scope="session")
def cluster_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three shards with a replica each, as long as the test session."""
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
async def cluster(cluster_of_session: RedisCluster) -> RedisCluster:
    """The cluster, whole, emptied of data and functions."""
    await cluster_of_session.heal()
    await cluster_of_session.flush()
    return cluster_of_session
