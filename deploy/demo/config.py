"""Configuration of the demo."""

from dataclasses import dataclass, replace
from pathlib import Path

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from deploy.local.config import FleetConfig
from router.policies import policy_by_name

POLICIES = ("lmetric", "round_robin", "vllm_v1", "max_hit_bounded")
"""Product score, round robin, vLLM's own balancer, most hits with a load cap."""

GENERATED = "generated"
"""Given as the trace: use the generated workload even where a recorded one is at hand."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The same requests, replayed once per policy against one fleet of simulated engines.

    Args:
        trace: trace file (Timestable's or Mooncake's format), or "generated"; by default the
            environment variable TRACE, then ../shared/traces/mooncake_conversation.jsonl.gz where
            that exists, then "generated".
        policies: scheduling policies, in order.
        requests: requests per policy.
        rows: rows at the start of the trace that whole conversations are drawn from.
        turns_min: conversations with fewer turns are left out: their prompts cannot be reused.
        prompt_tokens_max: conversations with a longer prompt are left out.
        output_length_factor: answers are this part of the recorded ones, to spare the processor.
        capacity_ratio: request rate / the fleet's estimated capacity.
        cache_ratio: KV$ of each engine / all distinct prompt tokens, unless the profile's device
            holds less.
        run_s: real seconds over which the requests of one policy arrive; the engines' clocks run
            as many times faster as that takes.
        workers: simulated engines.
        routers: router processes.
        profile: cost model of the engines.
        seed: of the choice of conversations and of the generated workload.
        out_dir: where results and logs go.
        quick: a few seconds with one policy, to see that everything works; figures say little.
    """

    trace: str | None = None
    policies: tuple[str, ...] = POLICIES
    requests: PositiveInt = 220
    rows: PositiveInt = 3_000
    turns_min: PositiveInt = 2
    prompt_tokens_max: PositiveInt = 32_768
    output_length_factor: PositiveFloat = 0.5
    capacity_ratio: PositiveFloat = 0.66
    cache_ratio: PositiveFloat = 0.25
    run_s: PositiveFloat = 23.0
    workers: PositiveInt = 4
    routers: PositiveInt = 2
    profile: str = "h20-qwen3-30b-a3b"
    seed: NonNegativeInt = 0
    out_dir: Path = Path("build/demo")
    quick: bool = False

    def __post_init__(self) -> None:
        """Check names before anything is started.

        Raises:
            ValueError: naming the key.
        """
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError("policies: at least one, and each only once")
        try:
            for policy in self.policies:
                policy_by_name(policy)
        except ValueError as error:
            raise ValueError(f"policies: {error}") from None
        fleet_of(self)


def fleet_of(config: DemoConfig) -> FleetConfig:
    """The fleet before the workload has decided speed-up and cache size.

    Raises:
        ValueError: naming the key.
    """
    return FleetConfig(
        workers=config.workers,
        routers=config.routers,
        profile=config.profile,
        run_dir=config.out_dir / "fleet",
        journal=True,
    )


def quickened(config: DemoConfig) -> DemoConfig:
    """The same in a few seconds: everything happens, and the figures say little."""
    return replace(
        config,
        policies=config.policies[:1],
        requests=min(config.requests, 30),
        rows=min(config.rows, 500),
        output_length_factor=0.1,
        run_s=3.0,
        workers=2,
    )
