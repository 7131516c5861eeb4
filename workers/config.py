"""Options of `python -m workers`, from command line, environment and file."""

import math
from dataclasses import dataclass
from typing import Literal

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from workers.simulated.eviction.policies import BELADY, EVICTIONS, LRU

MAX_MODEL_LEN_TOKENS = 131_072
PORT_MAX = 65_535
CAPACITY_BLOCKS_MIN = 2
"""One block's tokens for a prompt, and one for the answer."""

BLOCK_SIZE_TOKENS_STEP = 8
BLOCK_SIZE_TOKENS_MAX = 1024


class ConfigError(ValueError):
    """Options out of bounds or contradicting each other; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    """Run a simulated vLLM instance.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes a free one and logs it.
        model_name: name under which the model is served.
        adapter_names: LoRA adapters served beside it, by name.
        profile: accelerator and model whose step times are simulated (workers/simulated/profiles).
        speedup: virtual seconds that pass in a real one.
        block_size_tokens: tokens per KV block.
        capacity_blocks: KV blocks; by default what the profile's device holds beside the weights.
        eviction: which free block a full cache gives up next: a policy of docs/eviction.md.
        max_model_len_tokens: prompt and answer together; by default 131072 or what the blocks hold.
        max_num_seqs: requests in the batch at most.
        max_num_batched_tokens: tokens computed in a step at most.
        default_max_tokens: answer length of a chat request that names none.
        max_num_queued_reqs: requests that may wait; one more gets a 503.
        event_endpoint: ZMQ endpoint of the KV events; `null` turns them off.
        replay_endpoint: ZMQ endpoint of the replay service; `null` for none.
        event_topic: first frame of each event message.
        event_encoding: `map` as vLLM 0.31 and later, `array` as before.
        event_buffer_steps: event batches kept for replay.
        kv_connector: `nixl` takes `kv_transfer_params` as vLLM's NixlConnector does: the KV$ of a
            prompt is held for another engine, or taken from one; `null` ignores them, like vLLM.
        kv_transfer_bytes_per_s: bandwidth of one transfer, in virtual seconds.
        kv_transfer_latency_s: of a transfer, however small, in virtual seconds.
        kv_lease_duration_s: how long a prompt's KV$ is held for whoever takes it, in real seconds.
        kv_load_failure_policy: what becomes of a request whose KV$ cannot be had: `fail` or
            `recompute`.
        tier_capacity_blocks: blocks of a store behind the device, to which prompts are written and
            from which they are loaded when the device has dropped them, much like vLLM's
            OffloadingConnector; events tell of it as `CPU`. `null` for none.
        tier_bytes_per_s: bandwidth of a load from it, in virtual seconds.
        tier_latency_s: of such a load, in virtual seconds.
        tokenizer_path: folder with tokenizer.json and tokenizer_config.json; by default our own.
        api_key: bearer token that /v1/* requires.
        shutdown_timeout_s: how long running requests may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: NonNegativeInt = 8100
    model_name: str = "sim"
    adapter_names: tuple[str, ...] = ()
    profile: str = "h20-qwen3-30b-a3b"
    speedup: PositiveFloat = 1.0
    block_size_tokens: PositiveInt = 16
    capacity_blocks: PositiveInt | None = None
    eviction: str = LRU
    max_model_len_tokens: PositiveInt | None = None
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 8192
    default_max_tokens: PositiveInt = 256
    max_num_queued_reqs: PositiveInt = 4096
    event_endpoint: str | None = "tcp://*:5600"
    replay_endpoint: str | None = "tcp://*:5601"
    event_topic: str = ""
    event_encoding: Literal["map", "array"] = "map"
    event_buffer_steps: PositiveInt = 10_000
    kv_connector: Literal["nixl"] | None = None
    kv_transfer_bytes_per_s: PositiveFloat = 25e9
    kv_transfer_latency_s: NonNegativeFloat = 0.005
    kv_lease_duration_s: PositiveFloat = 30.0
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    tier_capacity_blocks: PositiveInt | None = None
    tier_bytes_per_s: PositiveFloat = 25e9
    tier_latency_s: NonNegativeFloat = 0.001
    tokenizer_path: str | None = None
    api_key: str | None = None
    shutdown_timeout_s: NonNegativeFloat = 5.0

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ConfigError: naming the option.
        """
        _check_port(self.port)
        if not self.model_name:
            raise ConfigError("model_name: must not be empty")
        if "" in self.adapter_names:
            raise ConfigError("adapter_names: no name may be empty")
        for key in (
            *("speedup", "shutdown_timeout_s", "kv_transfer_bytes_per_s"),
            *("kv_transfer_latency_s", "kv_lease_duration_s", "tier_bytes_per_s", "tier_latency_s"),
        ):
            if not math.isfinite(getattr(self, key)):
                raise ConfigError(f"{key}: must be finite, got {getattr(self, key)}")
        size = self.block_size_tokens
        if size > BLOCK_SIZE_TOKENS_MAX or size % BLOCK_SIZE_TOKENS_STEP:
            raise ConfigError(
                f"block_size_tokens: {size} is not a multiple of {BLOCK_SIZE_TOKENS_STEP} up to "
                f"{BLOCK_SIZE_TOKENS_MAX}"
            )
        if self.capacity_blocks is not None and self.capacity_blocks < CAPACITY_BLOCKS_MIN:
            raise ConfigError(
                f"capacity_blocks: {self.capacity_blocks} is below {CAPACITY_BLOCKS_MIN}"
            )
        _check_eviction(self.eviction)
        if self.max_num_batched_tokens < size:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is below "
                f"block_size_tokens ({size})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Start real vLLM with what this system relies on; further vLLM flags follow after `--`.

    Args:
        model: folder or hub name of the model.
        host: address to listen on.
        port: TCP port; this and the event ports are vLLM's own defaults.
        served_model_name: name under which the model is served; by default vLLM's own choice.
        event_endpoint: ZMQ endpoint of the KV events.
        replay_endpoint: ZMQ endpoint of the replay service.
        event_topic: first frame of each event message.
        replay_batches_max: event batches the engine keeps for replay; vLLM's default is 10,000.
        allow_unknown_version: start a vLLM whose version this launcher does not know.
    """

    model: str
    host: str = "127.0.0.1"
    port: PositiveInt = 8000
    served_model_name: str | None = None
    event_endpoint: str = "tcp://*:5557"
    replay_endpoint: str = "tcp://*:5558"
    event_topic: str = ""
    replay_batches_max: PositiveInt | None = None
    allow_unknown_version: bool = False

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ConfigError: naming the option.
        """
        _check_port(self.port)


def _check_eviction(name: str) -> None:
    served = ", ".join(known for known in EVICTIONS if known != BELADY)
    if name == BELADY:
        raise ConfigError(
            f"eviction: {name} needs to know all requests to come, which a server does not; "
            f"take one of {served}, or `python -m loadgen simulate`"
        )
    if name not in EVICTIONS:
        raise ConfigError(f"eviction: no `{name}`; there are {served}")


def _check_port(port: int) -> None:
    if port > PORT_MAX:
        raise ConfigError(f"port: {port} is above {PORT_MAX}")
