"""Options of the sidecar and of `inspect`: command line, environment, file."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
from redis.asyncio import ConnectionPool

from indexer.contract.limits import (
    BLOCK_SIZE_TOKENS_DEFAULT,
    BLOCK_SIZE_TOKENS_MAX,
    BLOCK_SIZE_TOKENS_MIN,
    INSTANCE_LEASE_RENEW_S,
    INSTANCES_EXPECTED_DEFAULT,
    PARTITIONS_MAX,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.event_source import is_endpoint

ENV_PREFIX: Final = "TIMESTABLE_INDEXER"

EXIT_USAGE: Final = 2
PORT_MAX: Final = 65535
INSTANCES_EXPECTED_MAX: Final = PARTITIONS_MAX * SLOTS_PER_PARTITION_MAX
REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
SECRETS: Final = ("engine_api_key",)

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """Publish what one vLLM instance holds and how busy it is (`inspect` shows what is published).

    Args:
        engine_url: the engine's own API, as seen from here
        redis_url: index and counters: redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH
        advertised_url: the engine's API as routers reach it; engine_url when not given
        engine_api_key: what the engine was given as --api-key
        event_endpoint: where KV events are published, for engines without GET /kv_event_sources;
            a host of * is the engine's; rank r of a data-parallel engine adds r to the port
        replay_endpoint: where missed KV events can be asked for, likewise
        event_topic: topic of the KV events, likewise
        model_scope: name of the fleet; the engine's first served model name when not given
        block_size_tokens: canonical block size, a multiple or a divisor of the engine's; the first
            instance of a fleet decides
        partitions: partitions of the fleet's index, 256 instances each; the first decides
        instances_expected: instances a partition is laid out for; the first decides
        scrape_interval_s: between two looks at the engine's metrics; each renews the lease
        metrics_host: address of our own /metrics
        metrics_port: port of our own /metrics; 0 for none
        journal_path: file that gets a JSON line for every write to the index, for audits
        log_level: least level of log lines
    """

    engine_url: str = "http://127.0.0.1:8000"
    redis_url: str = "redis://127.0.0.1:6390"
    advertised_url: str | None = None
    engine_api_key: str | None = None
    event_endpoint: str | None = None
    replay_endpoint: str | None = None
    event_topic: str | None = None
    model_scope: str | None = None
    block_size_tokens: PositiveInt = BLOCK_SIZE_TOKENS_DEFAULT
    partitions: PositiveInt = 1
    instances_expected: PositiveInt = INSTANCES_EXPECTED_DEFAULT
    scrape_interval_s: PositiveFloat = 0.1
    metrics_host: str = "0.0.0.0"  # noqa: S104 - Prometheus asks from elsewhere
    metrics_port: NonNegativeInt = 9100
    journal_path: Path | None = None
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the key.
        """
        _check_redis(self.redis_url)
        for key in ("engine_url", "advertised_url"):
            url = getattr(self, key)
            if url is not None and not _is_http(url):
                raise ValueError(f"{key}: `{url}` is not like http://HOST:PORT")
        size = self.block_size_tokens
        if not BLOCK_SIZE_TOKENS_MIN <= size <= BLOCK_SIZE_TOKENS_MAX:
            raise ValueError(
                f"block_size_tokens: {size} is not within {BLOCK_SIZE_TOKENS_MIN} and "
                f"{BLOCK_SIZE_TOKENS_MAX}"
            )
        if self.partitions > PARTITIONS_MAX:
            raise ValueError(f"partitions: {self.partitions} is above {PARTITIONS_MAX}")
        if self.instances_expected > INSTANCES_EXPECTED_MAX:
            raise ValueError(
                f"instances_expected: {self.instances_expected} is above {INSTANCES_EXPECTED_MAX}"
            )
        if self.scrape_interval_s > INSTANCE_LEASE_RENEW_S:
            raise ValueError(
                f"scrape_interval_s: {self.scrape_interval_s:g} is above "
                f"{INSTANCE_LEASE_RENEW_S:g}, which the lease needs"
            )
        if self.metrics_port > PORT_MAX:
            raise ValueError(f"metrics_port: {self.metrics_port} is above {PORT_MAX}")
        self._check_endpoints()

    def _check_endpoints(self) -> None:
        for key in ("event_endpoint", "replay_endpoint"):
            endpoint = getattr(self, key)
            if endpoint is not None and not is_endpoint(endpoint):
                raise ValueError(f"{key}: `{endpoint}` is not like tcp://HOST:PORT or ipc://PATH")
        if self.replay_endpoint is not None and self.event_endpoint is None:
            raise ValueError("replay_endpoint: needs event_endpoint beside it")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show fleets, instances and routers as they stand in Redis; reads only.

    Args:
        redis_url: index and counters: redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH
        format: tables for people, or one JSON document
    """

    redis_url: str = "redis://127.0.0.1:6390"
    format: Literal["table", "json"] = "table"

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the key.
        """
        _check_redis(self.redis_url)


def _check_redis(url: str) -> None:
    if url.partition("://")[0] not in REDIS_SCHEMES:
        raise ValueError(f"redis_url: `{url}` does not begin with redis://, rediss:// or unix://")
    try:
        # The port and the options of the URL are only read when a connection is made of them.
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]  # redis-py
    except (ValueError, TypeError) as error:
        raise ValueError(f"redis_url: {error}") from None


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def loggable(config: SidecarConfig) -> dict[str, Any]:
    """All values but secrets."""
    shown = {one.name: getattr(config, one.name) for one in fields(config)}
    for key in SECRETS:
        shown[key] = shown[key] and "***"
    shown["journal_path"] = config.journal_path and str(config.journal_path)
    parts = urlsplit(config.redis_url)
    if parts.password:
        netloc = f"{parts.username or ''}:***@{parts.hostname}:{parts.port or ''}"
        shown["redis_url"] = urlunsplit(parts._replace(netloc=netloc))
    return shown


def parse(args: Sequence[str]) -> SidecarConfig | InspectConfig:
    """Read the options; a bad key or value ends the process with a message that names it.

    The first argument may be `run` (also meant when it is missing) or `inspect`.
    """
    if args and args[0] == "inspect":
        return _parse(InspectConfig, "python -m indexer inspect", args[1:])
    rest = args[1:] if args and args[0] == "run" else args
    return _parse(SidecarConfig, "python -m indexer", rest)


_Config = TypeVar("_Config", SidecarConfig, InspectConfig)


def _parse(kind: type[_Config], prog: str, args: Sequence[str]) -> _Config:
    try:
        config = auto_cli(
            kind,
            prog=prog,
            default_env=True,
            env_prefix=ENV_PREFIX,
            as_positional=False,
            args=list(args),
        )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(EXIT_USAGE) from None
    assert isinstance(config, kind), config
    return config
