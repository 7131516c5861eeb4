"""Configuration of a router process: command line, environment, file."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from indexer.contract.link import address
from router.policies import policy_by_name

ENV_PREFIX: Final = "TIMESTABLE_ROUTER"

EXIT_USAGE: Final = 2
PORT_MAX: Final = 65535

ENGINE_KEEPALIVE_S: Final = 5.0
"""vLLM closes a connection that was idle for this long."""

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Route OpenAI requests to the vLLM instance where they cost least.

    Args:
        redis_url: index and counters: redis://HOST:PORT[,HOST:PORT] (the master of them),
            redis+sentinel://HOST:PORT/SERVICE, redis+cluster://HOST:PORT, with TLS rediss...,
            or unix:///PATH
        read_replicas: look prefixes up at the replicas of a cluster
        host: address to listen on
        port: port for clients; 0 takes any free one
        reuse_port: share the port with other router processes of this machine
        admin_port: listener of its own for /health /ready /metrics /fleet; none when not given
        policy: how instances are chosen (lmetric, least_loaded, round_robin, vllm_v1, max_hit,
            max_hit_bounded)
        allow_policy_override: let a request choose its policy by the header x-timestable-policy
        in_flight_credit: count prefixes that requests in prefill are about to compute, so that a
            burst of equal new prompts is not scattered
        share_reservations: book requests in Redis, so that all routers decide as one; false is
            for measuring what that is worth: this router then knows only its own requests and
            what engines report
        tokenizers: model name to path or hub name of its tokenizer, where the engine's own
            does not do
        tokenize_threads: threads that render templates and tokenize
        tokenize_deadline_s: a prompt that takes longer is routed without prefix hits
        index_deadline_s: Redis must answer within this, else the decision is made without it
        body_bytes_max: largest request body
        body_timeout_s: a request body must have arrived within this
        in_flight_requests_max: requests beyond this are refused with 429
        in_flight_bytes_max: bodies of all requests in flight beyond this are refused with 429
        retries_max: further instances to try as long as nothing has reached the client
        connect_timeout_s: for a new connection to an instance
        first_byte_timeout_s: for the first byte of an answer, queueing and prefill included
        idle_timeout_s: between two pieces of an answer, on either side
        keepalive_s: an unused connection to an instance is closed after this
        drain_notice_s: on SIGTERM, how long /ready says no before requests are refused
        drain_deadline_s: on SIGTERM, how long answers may take to finish
        log_level: least level of log lines
    """

    redis_url: str = "redis://127.0.0.1:6390"
    read_replicas: bool = False
    host: str = "127.0.0.1"
    port: NonNegativeInt = 8000
    reuse_port: bool = False
    admin_port: NonNegativeInt | None = None
    policy: str = "lmetric"
    allow_policy_override: bool = False
    in_flight_credit: bool = True
    share_reservations: bool = True
    tokenizers: dict[str, str] = field(default_factory=dict)
    tokenize_threads: PositiveInt = 2
    tokenize_deadline_s: PositiveFloat = 2.0
    index_deadline_s: PositiveFloat = 0.25
    body_bytes_max: PositiveInt = 16 * 1024 * 1024
    body_timeout_s: PositiveFloat = 60.0
    in_flight_requests_max: PositiveInt = 4096
    in_flight_bytes_max: PositiveInt = 1024 * 1024 * 1024
    retries_max: NonNegativeInt = 2
    connect_timeout_s: PositiveFloat = 2.0
    first_byte_timeout_s: PositiveFloat = 600.0
    idle_timeout_s: PositiveFloat = 120.0
    keepalive_s: PositiveFloat = 3.0
    drain_notice_s: NonNegativeFloat = 1.0
    drain_deadline_s: NonNegativeFloat = 60.0
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        """Check what holds between values.

        Raises:
            ValueError: naming the key.
        """
        try:
            policy_by_name(self.policy)
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None
        for key in ("port", "admin_port"):
            if (getattr(self, key) or 0) > PORT_MAX:
                raise ValueError(f"{key}: {getattr(self, key)} is above {PORT_MAX}")
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(f"admin_port: {self.admin_port} is the port for clients already")
        try:
            topology = address.parse(self.redis_url).topology
        except ValueError as error:
            raise ValueError(f"redis_url: {error}") from None
        if self.read_replicas and topology is not address.Topology.CLUSTER:
            raise ValueError("read_replicas: needs a cluster: redis_url redis+cluster://HOST:PORT")
        if self.keepalive_s >= ENGINE_KEEPALIVE_S:
            raise ValueError(
                f"keepalive_s: {self.keepalive_s:g} must be below {ENGINE_KEEPALIVE_S:g}, after "
                "which vLLM itself closes the connection"
            )
        if self.body_bytes_max > self.in_flight_bytes_max:
            raise ValueError(
                f"in_flight_bytes_max: {self.in_flight_bytes_max} would refuse a body that "
                f"body_bytes_max: {self.body_bytes_max} allows"
            )


def loggable(config: RouterConfig) -> dict[str, Any]:
    """All values but the password of Redis."""
    shown = {one.name: getattr(config, one.name) for one in fields(config)}
    shown["redis_url"] = address.without_password(config.redis_url)
    return shown


def parse_config(args: Sequence[str]) -> RouterConfig:
    """Read the configuration; a bad key or value ends the process with a message that names it.

    Options come first, then a file given by `--config`, then the environment, then a file that the
    environment names (TIMESTABLE_ROUTER_CONFIG).
    """
    try:
        config = auto_cli(
            RouterConfig,
            prog="python -m router",
            default_env=True,
            env_prefix=ENV_PREFIX,
            as_positional=False,
            args=list(args),
        )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(EXIT_USAGE) from None
    assert isinstance(config, RouterConfig), config
    return config
