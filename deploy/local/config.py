"""Configuration of the local fleet."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from deploy.local.ports import PORT_MAX
from router.policies import policy_by_name
from workers.simulated.cost_model import ProfileError, load_profile

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """The local fleet: an embedded Redis, simulated vLLM workers with a sidecar each, and routers.

    Args:
        workers: simulated engines; each gets a sidecar.
        prefill_workers: so many of the workers, the first ones, only prefill, and the others only
            decode; 0: all do both (docs/disaggregation.md).
        routers: router processes behind the one router port.
        policy: scheduling policy of requests that name none.
        profile: cost model of the engines: h20-qwen3-30b-a3b or a100-llama-3.1-8b.
        block_size_tokens: tokens per block of the engines.
        capacity_blocks: KV$ blocks of each engine.
        max_num_batched_tokens: tokens an engine computes in one step.
        max_num_seqs: requests an engine runs at once.
        speedup: how many simulated seconds pass in a real one.
        model_name: name under which the engines serve.
        host: address everything listens on.
        router_port: port of all routers; the next free one when it is taken, as for all ports.
        own_ports: give each router a port of its own, from router_port up, instead.
        admin_port: first of the routers' own ports.
        engine_port: first of the engines' ports.
        event_port: first of the engines' event and replay ports (two each).
        metrics_port: first of the sidecars' metrics ports.
        redis_port: port of the embedded Redis.
        run_dir: where logs and journals go; those of an earlier fleet are removed.
        journal: let each sidecar write what it published to a file in run_dir.
        log_level: of the routers.
        ready_deadline_s: how long a part may take to come up.
        drain_s: how long routers may take to finish their requests at the end.
    """

    workers: PositiveInt = 4
    prefill_workers: NonNegativeInt = 0
    routers: PositiveInt = 2
    policy: str = "lmetric"
    profile: str = "h20-qwen3-30b-a3b"
    block_size_tokens: PositiveInt = 16
    capacity_blocks: PositiveInt = 40_000
    max_num_batched_tokens: PositiveInt = 8_192
    max_num_seqs: PositiveInt = 256
    speedup: PositiveFloat = 1.0
    model_name: str = "sim"
    host: str = "127.0.0.1"
    router_port: PositiveInt = 8000
    own_ports: bool = False
    admin_port: PositiveInt = 8001
    engine_port: PositiveInt = 8100
    event_port: PositiveInt = 5600
    metrics_port: PositiveInt = 9100
    redis_port: PositiveInt = 6390
    run_dir: Path = Path("build/up")
    journal: bool = False
    log_level: LogLevel = "info"
    ready_deadline_s: PositiveFloat = 60.0
    drain_s: NonNegativeInt = 20

    def __post_init__(self) -> None:
        """Check what would otherwise end a part that has just been started.

        Raises:
            ValueError: naming the key.
        """
        try:
            policy_by_name(self.policy)
        except ValueError as error:
            raise ValueError(f"policy: {error}") from None
        try:
            load_profile(self.profile)
        except ProfileError as error:
            raise ValueError(f"profile: {error}") from None
        if self.prefill_workers >= self.workers:
            raise ValueError(
                f"prefill_workers: {self.prefill_workers} of {self.workers} workers leave none to "
                "decode; raise workers, or give 0 for workers that do both"
            )
        for key in (field.name for field in fields(self) if field.name.endswith("_port")):
            if getattr(self, key) > PORT_MAX:
                raise ValueError(f"{key}: {getattr(self, key)} is above {PORT_MAX}")
