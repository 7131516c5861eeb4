"""Configuration of a router process: command line, environment, file."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from indexer.contract.link import address
from router.door.options import DoorOptions, check_door, masked
from router.policies import policy_by_name

ENV_PREFIX: Final = "TIMESTABLE_ROUTER"

EXIT_USAGE: Final = 2
PORT_MAX: Final = 65535

RESPONSES_KEPT_MAX_S: Final = 30 * 24 * 3600.0
"""Engines forget such answers when they restart, so much sooner."""

ENGINE_KEEPALIVE_S: Final = 5.0
"""vLLM closes a connection that was idle for this long."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig(DoorOptions):
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
        processes: routers that this command runs on one port, each on a core of its own and with
            these bounds of its own; the i-th of them, from 0, has admin port admin_port + i. One
            that dies is started again
        process_number: which of these processes this is; given by the one that starts them
        process_restarts: how many have died in its place before; likewise
        policy: how instances are chosen: lmetric; smetric, for agents; or, to compare with them,
            lmetric_artifact, random, round_robin, power_of_two, least_loaded, vllm_v1,
            least_prefill, hit_ratio_product, caused_delay, max_hit, max_hit_bounded, linear_10
            (30, 50, 70, 90), bailian, aibrix, dynamo, llm_d_scorers, llm_d_sticky,
            smg_cache_aware, preble, session_affinity
        allow_policy_override: let a request choose its policy by the header x-timestable-policy
        allow_instance_choice: let a request name the only instances that may be chosen, by the
            header x-timestable-instances
        in_flight_credit: count prefixes that requests in prefill are about to compute, so that a
            burst of equal new prompts is not scattered
        detect_hot_prefixes: count what prompts begin with, and where one prefix is so frequent that
            it may overload the instances that hold it, send its requests elsewhere until more
            instances hold it; needs share_reservations
        share_reservations: book requests in Redis, so that all routers decide as one; false is
            for measuring what that is worth: this router then knows only its own requests and
            what engines report
        model_aliases: name that clients may ask for to name that engines serve; in such a request
            the model's name is replaced, and nothing else
        inject_usage: ask for the usage of every stream, so that predicted hits can be compared;
            clients who did not ask do not see it
        tell_category: tell engines each request's type and turn in a header, for those that evict
            by them (docs/vllm_plugins.md)
        responses_kept_s: how long it is remembered which instance holds an answer of
            /v1/responses, for requests that name it, at most 30 days; 0 does not ask for it at all
        tokenizers: model name to path or hub name of its tokenizer, where the engine's own
            does not do
        tokenize_threads: threads that render templates and tokenize
        tokenize_deadline_s: a prompt that takes longer is routed by its text, not its tokens
        tokenize_waiting_max: prompts that may wait for such a thread; more are routed by their text
        tokenize_cache_bytes: of each tokenizer, for parts of chats it has seen; 0 tokenizes every
            turn whole
        index_deadline_s: Redis must answer within this, else the decision is made without it
        body_bytes_max: largest request body
        body_timeout_s: a request body must have arrived within this
        in_flight_requests_max: requests beyond this wait, see queue_requests_max
        in_flight_bytes_max: bodies of all requests beyond this are refused with 429
        retries_max: further instances to try as long as nothing has reached the client
        continue_streams: go on with a plain streamed completion at another instance when its own
            breaks off, where that can be exact; reads every event of such streams
        handover_kept_s: how long engines certainly hold what they have prefilled for another
            instance, for a second try at decoding; below vLLM's kv_lease_duration
        connect_timeout_s: for a new connection to an instance
        first_byte_timeout_s: for the first byte of an answer, queueing and prefill included
        idle_timeout_s: between two pieces of an answer, on either side
        total_timeout_s: from the first dispatch of a request to the last byte of its answer
        keepalive_s: an unused connection to an instance is closed after this
        ejection_failures_min: failures in a row after which an instance is left out for a while
        ejection_lease_s: how long, the first time; each time in a row it is doubled
        ejection_lease_max_s: how long at most
        ejection_ratio_max: how much of a fleet may be left out at once, 0..1; never all of it;
            0 leaves out nobody
        drain_notice_s: on SIGTERM, how long /ready says no before requests are refused
        drain_deadline_s: on SIGTERM, how long answers may take to finish
        log_level: least level of log lines
        log_format: json, one object a line; or console, to be read by a person
        otlp_endpoint: base URL of an OpenTelemetry collector (OTLP over HTTP) that is told of every
            request; needs the extra timestable[otel]
        otlp_sample_ratio: share of traces told, 0..1, of those that begin at this router
        record_trace: file (.jsonl) that gets a line for each answered request, without its text, to
            study and to replay (docs/analysis.md); where there is one, another beside it
        record_bytes_max: largest such file; then the recording ends
    """

    redis_url: str = "redis://127.0.0.1:6390"
    read_replicas: bool = False
    host: str = "127.0.0.1"
    port: NonNegativeInt = 8000
    reuse_port: bool = False
    admin_port: NonNegativeInt | None = None
    processes: PositiveInt = 1
    process_number: NonNegativeInt | None = None
    process_restarts: NonNegativeInt = 0
    policy: str = "lmetric"
    allow_policy_override: bool = False
    allow_instance_choice: bool = False
    in_flight_credit: bool = True
    detect_hot_prefixes: bool = False
    share_reservations: bool = True
    model_aliases: dict[str, str] = field(default_factory=dict)
    inject_usage: bool = False
    tell_category: bool = False
    responses_kept_s: NonNegativeFloat = 3600.0
    tokenizers: dict[str, str] = field(default_factory=dict)
    tokenize_threads: PositiveInt = 2
    tokenize_deadline_s: PositiveFloat = 2.0
    tokenize_waiting_max: PositiveInt = 512
    tokenize_cache_bytes: NonNegativeInt = 64 * 1024 * 1024
    index_deadline_s: PositiveFloat = 0.25
    body_bytes_max: PositiveInt = 16 * 1024 * 1024
    body_timeout_s: PositiveFloat = 60.0
    in_flight_requests_max: PositiveInt = 4096
    in_flight_bytes_max: PositiveInt = 1024 * 1024 * 1024
    retries_max: NonNegativeInt = 2
    continue_streams: bool = False
    handover_kept_s: NonNegativeFloat = 20.0
    connect_timeout_s: PositiveFloat = 2.0
    first_byte_timeout_s: PositiveFloat = 600.0
    idle_timeout_s: PositiveFloat = 120.0
    total_timeout_s: PositiveFloat = 4 * 3600.0
    keepalive_s: PositiveFloat = 3.0
    ejection_failures_min: PositiveInt = 3
    ejection_lease_s: PositiveFloat = 5.0
    ejection_lease_max_s: PositiveFloat = 60.0
    ejection_ratio_max: NonNegativeFloat = 0.5
    drain_notice_s: NonNegativeFloat = 1.0
    drain_deadline_s: NonNegativeFloat = 60.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "json"
    otlp_endpoint: str | None = None
    otlp_sample_ratio: NonNegativeFloat = 1.0
    record_trace: str | None = None
    record_bytes_max: PositiveInt = 1024 * 1024 * 1024

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
        _check_processes(self)
        try:
            topology = address.parse(self.redis_url).topology
        except ValueError as error:
            raise ValueError(f"redis_url: {error}") from None
        if self.read_replicas and topology is not address.Topology.CLUSTER:
            raise ValueError("read_replicas: needs a cluster: redis_url redis+cluster://HOST:PORT")
        _check_classes(self)
        _check_ejection(self)
        _check_traces(self)
        check_door(self)
        if not self.responses_kept_s <= RESPONSES_KEPT_MAX_S:
            raise ValueError(
                f"responses_kept_s: {self.responses_kept_s:g} is above {RESPONSES_KEPT_MAX_S:.0f} "
                "(30 days)"
            )
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


def _check_processes(config: RouterConfig) -> None:
    if config.processes == 1 or not config.admin_port:
        return
    last = config.admin_port + config.processes - 1
    if last > PORT_MAX or config.admin_port <= config.port <= last:
        raise ValueError(
            f"admin_port: {config.processes} processes have admin ports {config.admin_port} to "
            f"{last}; the port for clients may not be among them, nor any above {PORT_MAX}"
        )


def _check_classes(config: RouterConfig) -> None:
    if config.detect_hot_prefixes and not config.share_reservations:
        raise ValueError(
            "detect_hot_prefixes: requests are counted with their reservations; leave "
            "share_reservations true"
        )


def _check_ejection(config: RouterConfig) -> None:
    if config.ejection_ratio_max > 1:
        raise ValueError(f"ejection_ratio_max: {config.ejection_ratio_max:g} is above 1")
    if config.ejection_lease_s > config.ejection_lease_max_s:
        raise ValueError(
            f"ejection_lease_s: {config.ejection_lease_s:g} is above "
            f"ejection_lease_max_s: {config.ejection_lease_max_s:g}"
        )


def _check_traces(config: RouterConfig) -> None:
    if config.otlp_sample_ratio > 1:
        raise ValueError(f"otlp_sample_ratio: {config.otlp_sample_ratio:g} is above 1")
    if config.record_trace is not None and not config.record_trace.endswith(".jsonl"):
        raise ValueError(f"record_trace: {config.record_trace} must end in .jsonl")
    endpoint = config.otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp_endpoint: {endpoint} is no URL such as http://collector:4318")


def loggable(config: RouterConfig) -> dict[str, Any]:
    """All values but secrets and the password of Redis."""
    shown = {one.name: masked(one.name, getattr(config, one.name)) for one in fields(config)}
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
