"""Options of the sidecar and of `inspect`: command line, environment, file."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from indexer.contract.limits import (
    BLOCK_SIZE_TOKENS_DEFAULT,
    BLOCK_SIZE_TOKENS_MAX,
    BLOCK_SIZE_TOKENS_MIN,
    INSTANCE_LEASE_RENEW_S,
    INSTANCES_EXPECTED_DEFAULT,
    PARTITIONS_MAX,
    SLOTS_PER_PARTITION_MAX,
)
from indexer.contract.link import address
from indexer.engine.event_source import is_endpoint
from indexer.engine.vllm_events import DEVICE_MEDIUM

ENV_PREFIX: Final = "TIMESTABLE_INDEXER"

EXIT_USAGE: Final = 2
PORT_MAX: Final = 65535
INSTANCES_EXPECTED_MAX: Final = PARTITIONS_MAX * SLOTS_PER_PARTITION_MAX
PREFILL_TOKENS_PER_S_MAX: Final = 1e9
"""A thousand times what any device does; routers divide by it."""

TIER_LATENCY_MAX_S: Final = 60.0
ENGINE_RANKS_MAX: Final = SLOTS_PER_PARTITION_MAX
SCRAPE_INTERVAL_MIN_S: Final = 0.01
"""A heartbeat each: more often would be load without news."""

SECRETS: Final = ("engine_api_key",)

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class SidecarConfig:
    """Publish what one vLLM instance holds and how busy it is (`inspect` shows what is published).

    Args:
        engine_url: the engine's own API, as seen from here
        redis_url: index and counters: redis://HOST:PORT[,HOST:PORT] (the master of them),
            redis+sentinel://HOST:PORT/SERVICE, redis+cluster://HOST:PORT, with TLS rediss...,
            or unix:///PATH
        advertised_url: the engine's API as routers reach it; engine_url when not given
        engine_api_key: what the engine was given as --api-key
        engine_ca: PEM file of authorities of an engine with an https URL; the system's by default
        engine_cert: PEM file of the certificate shown to an engine that asks for one
        engine_key: PEM file of its key
        event_endpoint: where KV events are published, for engines without GET /kv_event_sources;
            a host of * is the engine's; rank r of a data-parallel engine adds r to the port
        replay_endpoint: where missed KV events can be asked for, likewise
        event_topic: topic of the KV events, likewise
        engine_block_size_tokens: tokens of the engine's own blocks, for engines whose /metrics has
            no vllm:cache_config_info; over what the engine tells
        engine_capacity_blocks: device blocks of a rank, likewise
        engine_ranks: data-parallel ranks behind event_endpoint, likewise
        approximate: for engines whose KV events cannot be had: what they hold is learned from what
            routers tell to have been computed, and forgotten as their KV$ would
        prefill_tokens_per_s: how fast the engine's device computes a prompt, where others of its
            fleet are faster or slower: tokens then count by how long they take
        measure_prefill: measure it, with three prompts of 8,256 tokens in all, when an engine
            process is first seen and has no requests
        role: what routers use the engine for: `prefill` and `decode` where they are apart and the
            engine hands its KV$ on (vLLM's NixlConnector), `both` for whole requests
        tier_media: from where the engine loads KV$ that its device lacks, as its events name it,
            such as '["CPU"]': vLLM's OffloadingConnector, LMCache. None when not given: what is
            there is not counted
        tier_tokens_per_s: how fast it loads, tokens a second: the link's bytes a second over the
            KV$ bytes of a token. Routers weigh it against computing
        tier_latency_s: of a load, beside that
        tier_shared: every engine of the fleet that says so loads what any of them has written
        tier_capacity_tokens: what the tier holds; of what is more, the oldest is taken for gone.
            For emitters that never tell of evictions; 2^20 canonical blocks when not given
        engines_file: file with the URL of an engine on each line, instead of engine_url; read again
            when it changes. This one process is the sidecar of all of them, approximate
        engines_dns: NAME:PORT, likewise: an engine at each address of that name, asked for again
            every few seconds
        model_scope: name of the fleet; the engine's first served model name when not given
        block_size_tokens: canonical block size, a multiple or a divisor of the engine's; the first
            instance of a fleet decides
        partitions: partitions of the fleet's index, 256 instances each; the first decides
        instances_expected: instances a partition is laid out for; the first decides
        index_bytes_max: memory that the fleet's index may take in Redis, all partitions together;
            none when not given, and in any case what the server's own maxmemory leaves. Give all
            sidecars of a fleet the same: the one that sweeps at the time applies its own
        step_endpoint: where the engine tells its load after each step, if our plugin for vLLM runs
            in it (docs/vllm_plugins.md): its metrics are then asked once a second only; a host of
            * is the engine's
        scrape_interval_s: between two looks at the engine's metrics; each renews the lease
        metrics_host: address of our own HTTP: /metrics, /health, /state, and POST /drain, /resume
        metrics_port: port of it; 0 for none
        draining: start drained: no new request comes until POST /resume
        checkpoint_path: directory for checkpoints of what the engine holds, from which a sidecar
            started again goes on; none when not given. Needs an engine with a replay socket
        journal_path: file that gets a JSON line for every write to the index, for audits
        log_level: least level of log lines
    """

    engine_url: str = "http://127.0.0.1:8000"
    redis_url: str = "redis://127.0.0.1:6390"
    advertised_url: str | None = None
    engine_api_key: str | None = None
    engine_ca: str | None = None
    engine_cert: str | None = None
    engine_key: str | None = None
    event_endpoint: str | None = None
    replay_endpoint: str | None = None
    event_topic: str | None = None
    engine_block_size_tokens: PositiveInt | None = None
    engine_capacity_blocks: PositiveInt | None = None
    engine_ranks: PositiveInt | None = None
    approximate: bool = False
    prefill_tokens_per_s: PositiveFloat | None = None
    measure_prefill: bool = False
    role: Literal["prefill", "decode", "both"] = "both"
    tier_media: tuple[str, ...] = ()
    tier_tokens_per_s: PositiveFloat | None = None
    tier_latency_s: NonNegativeFloat = 0.0
    tier_shared: bool = False
    tier_capacity_tokens: PositiveInt | None = None
    engines_file: Path | None = None
    engines_dns: str | None = None
    model_scope: str | None = None
    block_size_tokens: PositiveInt = BLOCK_SIZE_TOKENS_DEFAULT
    partitions: PositiveInt = 1
    instances_expected: PositiveInt = INSTANCES_EXPECTED_DEFAULT
    index_bytes_max: PositiveInt | None = None
    step_endpoint: str | None = None
    scrape_interval_s: PositiveFloat = 0.1
    metrics_host: str = "0.0.0.0"  # noqa: S104 - Prometheus asks from elsewhere
    metrics_port: NonNegativeInt = 9100
    draining: bool = False
    checkpoint_path: Path | None = None
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
            if url is not None and not is_http(url):
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
        if self.scrape_interval_s < SCRAPE_INTERVAL_MIN_S:
            raise ValueError(
                f"scrape_interval_s: {self.scrape_interval_s:g} is below {SCRAPE_INTERVAL_MIN_S:g}"
            )
        if self.scrape_interval_s > INSTANCE_LEASE_RENEW_S:
            raise ValueError(
                f"scrape_interval_s: {self.scrape_interval_s:g} is above "
                f"{INSTANCE_LEASE_RENEW_S:g}, which the lease needs"
            )
        rate = self.prefill_tokens_per_s
        if rate is not None and not 1 <= rate <= PREFILL_TOKENS_PER_S_MAX:
            raise ValueError(
                f"prefill_tokens_per_s: {rate:g} is not within 1 and {PREFILL_TOKENS_PER_S_MAX:g}"
            )
        if self.metrics_port > PORT_MAX:
            raise ValueError(f"metrics_port: {self.metrics_port} is above {PORT_MAX}")
        self._check_endpoints()
        self._check_approximate()
        self._check_tier()

    def _check_tier(self) -> None:
        rate = self.tier_tokens_per_s
        if bool(self.tier_media) != (rate is not None):
            missing = "tier_tokens_per_s" if self.tier_media else "tier_media"
            raise ValueError(f"{missing}: is missing, a tier has both tier_media and its speed")
        if rate is not None and not 1 <= rate <= PREFILL_TOKENS_PER_S_MAX:
            raise ValueError(
                f"tier_tokens_per_s: {rate:g} is not within 1 and {PREFILL_TOKENS_PER_S_MAX:g}"
            )
        if not self.tier_latency_s <= TIER_LATENCY_MAX_S:
            raise ValueError(
                f"tier_latency_s: {self.tier_latency_s:g} is above {TIER_LATENCY_MAX_S:g}"
            )
        if DEVICE_MEDIUM in self.tier_media or "" in self.tier_media:
            raise ValueError(f"tier_media: {DEVICE_MEDIUM} is the device itself, and none is empty")
        if self.tier_media and (self.approximate or self.engines_file or self.engines_dns):
            raise ValueError("tier_media: says nothing where no events are followed")

    def _check_approximate(self) -> None:
        lists = [key for key in ("engines_file", "engines_dns") if getattr(self, key) is not None]
        if len(lists) > 1:
            raise ValueError("engines_dns: give one list of engines, not engines_file as well")
        if self.engines_dns is not None and host_and_port(self.engines_dns) is None:
            raise ValueError(f"engines_dns: `{self.engines_dns}` is not like NAME:PORT")
        if lists and self.advertised_url is not None:
            raise ValueError(f"advertised_url: cannot be that of every engine of {lists[0]}")
        name = lists[0] if lists else "approximate"
        if lists and self.step_endpoint is not None:
            raise ValueError(f"step_endpoint: cannot be that of every engine of {lists[0]}")
        for key in ("event_endpoint", "checkpoint_path"):
            if (lists or self.approximate) and getattr(self, key) is not None:
                raise ValueError(f"{key}: says nothing where no events are followed ({name})")

    def _check_endpoints(self) -> None:
        if (self.engine_cert is None) != (self.engine_key is None):
            raise ValueError("engine_key: give engine_cert and engine_key, or neither")
        for key in ("event_endpoint", "replay_endpoint", "step_endpoint"):
            endpoint = getattr(self, key)
            if endpoint is not None and not is_endpoint(endpoint):
                raise ValueError(f"{key}: `{endpoint}` is not like tcp://HOST:PORT or ipc://PATH")
        for key in ("replay_endpoint", "engine_ranks"):
            is_learned = self.approximate or self.engines_file or self.engines_dns
            by_itself = key == "engine_ranks" and is_learned
            if getattr(self, key) is not None and self.event_endpoint is None and not by_itself:
                raise ValueError(f"{key}: needs event_endpoint beside it")
        if self.engine_ranks is not None and self.engine_ranks > ENGINE_RANKS_MAX:
            raise ValueError(f"engine_ranks: {self.engine_ranks} is above {ENGINE_RANKS_MAX}")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show fleets, instances and routers as they stand in Redis; reads only.

    Exit status: 0; 1 Redis does not answer; 2 a bad option. With check: 0 all is well, 1 it is not,
    3 Redis does not answer.

    Args:
        redis_url: index and counters: redis://HOST:PORT[,HOST:PORT] (the master of them),
            redis+sentinel://HOST:PORT/SERVICE, redis+cluster://HOST:PORT, with TLS rediss...,
            or unix:///PATH
        format: tables for people, or one JSON document
        check: instead, whether the books balance: what is reserved against what ledgers say, and
            keys that nobody owns and nothing ends
    """

    redis_url: str = "redis://127.0.0.1:6390"
    format: Literal["table", "json"] = "table"
    check: bool = False

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the key.
        """
        _check_redis(self.redis_url)


@dataclass(frozen=True, kw_only=True)
class DrainConfig:
    """Let an engine take no new request, and wait until none is in flight.

    Exit status: 0 empty, 1 still busy after wait_s, 2 a bad option, 3 the sidecar is not reached.

    Args:
        sidecar_url: its metrics_host and metrics_port, like http://HOST:9100
        wait_s: how long to wait until it is empty
        resume: take requests again instead, and do not wait
    """

    sidecar_url: str
    wait_s: NonNegativeFloat = 600.0
    resume: bool = False

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the key.
        """
        if not is_http(self.sidecar_url):
            raise ValueError(f"sidecar_url: `{self.sidecar_url}` is not like http://HOST:PORT")


def _check_redis(url: str) -> None:
    try:
        address.parse(url)
    except ValueError as error:
        raise ValueError(f"redis_url: {error}") from None


def is_http(url: str) -> bool:
    """Whether this is like http://HOST:PORT."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def host_and_port(text: str) -> tuple[str, int] | None:
    """The parts of NAME:PORT, [ADDRESS]:PORT among them; None when it is not that."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return (host, port) if host and port and parts.netloc == text and "@" not in text else None


def loggable(config: SidecarConfig) -> dict[str, Any]:
    """All values but secrets."""
    shown = {one.name: getattr(config, one.name) for one in fields(config)}
    for key in SECRETS:
        shown[key] = shown[key] and "***"
    for key in ("journal_path", "checkpoint_path", "engines_file"):
        shown[key] = shown[key] and str(shown[key])
    shown["redis_url"] = address.without_password(config.redis_url)
    return shown


def parse(args: Sequence[str]) -> SidecarConfig | InspectConfig | DrainConfig:
    """Read the options; a bad key or value ends the process with a message that names it.

    The first argument may be `run` (also meant when it is missing), `inspect` or `drain`.
    """
    if args and args[0] == "drain":
        return _parse(DrainConfig, "python -m indexer drain", _with_values(args[1:]))
    if args and args[0] == "inspect":
        return _parse(InspectConfig, "python -m indexer inspect", args[1:])
    rest = args[1:] if args and args[0] == "run" else args
    return _parse(SidecarConfig, "python -m indexer", rest)


def _with_values(args: Sequence[str]) -> list[str]:
    """`--resume` alone means `--resume=true`."""
    out: list[str] = []
    for at, arg in enumerate(args):
        follows = args[at + 1] if at + 1 < len(args) else "--"
        out.append("--resume=true" if arg == "--resume" and follows.startswith("--") else arg)
    return out


_Config = TypeVar("_Config", SidecarConfig, InspectConfig, DrainConfig)


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
