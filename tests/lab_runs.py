"""Runs of the policy lab, made up: shapes as of real ones, figures from a few numbers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from loadgen.simulation.lab.figures import (
    CHAT_SLO,
    BusySamples,
    Requests,
    RunFigures,
    RunKey,
    Window,
    figures,
)

WORKLOADS = ("mooncake_conversation", "mooncake_synthetic", "agents", "chat", "api", "hot_prefix")
LOADS = (0.5, 0.9, 1.1)
POLICIES = ("lmetric", "least_loaded", "vllm_v1", "linear_50", "bailian", "max_hit", "smetric")


def lab_run(
    policy: str = "lmetric",
    *,
    workload: str = "chat",
    load: float = 0.5,
    seed: int = 1,
    routers: int = 1,
    staleness_s: float = 0.0,
    variant: str = "",
    **changes: Any,
) -> RunFigures:
    """One run whose figures are all of them round; any may be given."""
    values = {
        f"{name}_{part}_s": scale * factor
        for name, scale in (("ttft", 0.2), ("tpot", 0.02))
        for part, factor in (("mean", 1.0), ("p50", 0.8), ("p95", 2.0), ("p99", 4.0))
    }
    values |= {
        "goodput_rps": 9.0,
        "goodput_tokens_per_s": 9000.0,
        "prompt_tokens_per_s": 12000.0,
        "hit_ratio": 0.6,
        "imbalance": 1.25,
        "offered_rps": 10.0,
        "arriving_rps": 9.5,
        "arriving_drift": 1.02,
        "ttft_drift": 1.1,
        "slo_ratio": 0.9,
        "cpu_s": 2.0,
        "virtual_s": 600.0,
    }
    return RunFigures(
        workload=workload,
        load=load,
        policy=policy,
        instances=16,
        routers=routers,
        staleness_s=staleness_s,
        seed=seed,
        variant=variant,
        **{
            **values,
            "requests": 1000,
            "lost": 0,
            "ttft_quantiles_s": tuple(np.linspace(0.1, 1.0, 101).tolist()),
            "tpot_quantiles_s": tuple(np.linspace(0.01, 0.05, 101).tolist()),
            "imbalance_over_time": ((10.0, 1.5), (20.0, 1.25)),
            **changes,
        },
    )


def drawn_run(key: RunKey) -> RunFigures:
    """Drawn requests on 16 instances, slower and less even with the load and the policy's place."""
    place = POLICIES.index(key.policy)
    generator = np.random.default_rng([place, key.seed, WORKLOADS.index(key.workload)])
    count, end_s = 2000, 600.0
    arrived_s = np.sort(generator.uniform(0, end_s, count))
    slow = (1 + 0.15 * place) * (1 + 5 * key.staleness_s) / max(0.05, 1.15 - key.load)
    first_s = arrived_s + generator.lognormal(np.log(0.15 * slow), 0.9, count)
    outputs = generator.integers(1, 400, count).astype(float)
    tpot_s = generator.lognormal(np.log(0.02 + 0.004 * slow), 0.3, count)
    prompts = generator.integers(100, 8000, count).astype(float)
    busy_s = np.cumsum(generator.gamma(8 / (1 + place), 1.0, (121, key.instances)), axis=0)
    return figures(
        key,
        Requests(
            nominal_s=arrived_s,
            arrived_s=arrived_s,
            first_token_s=first_s,
            ended_s=first_s + tpot_s * (outputs - 1),
            prompt_tokens=prompts,
            output_tokens=outputs,
            hit_tokens=prompts * generator.uniform(0.2, 0.9 - 0.05 * place, count),
            slot=generator.integers(0, key.instances, count),
        ),
        BusySamples(at_s=np.linspace(0, end_s, 121), busy_s=busy_s),
        Window(from_s=60.0, to_s=end_s),
        slo=CHAT_SLO,
        offered_rps=count / end_s,
        cpu_s=1.0,
        virtual_s=end_s,
    )


def drawn_matrix(
    *, policies: tuple[str, ...] = POLICIES, seeds: tuple[int, ...] = (1, 2)
) -> Iterator[RunFigures]:
    """The default matrix; one workload also with four stale routers, one also with a tier."""
    for workload in WORKLOADS:
        for load in LOADS:
            for policy in policies:
                for seed in seeds:
                    key = RunKey(
                        workload=workload,
                        load=load,
                        policy=policy,
                        instances=16,
                        routers=1,
                        staleness_s=0.0,
                        seed=seed,
                    )
                    yield drawn_run(key)
                    if workload == "agents" and policy in ("lmetric", "smetric"):
                        yield drawn_run(replace(key, variant="tier"))
                    if workload == "chat" and load < 1:
                        for staleness_s in (0.0, 0.05, 0.25, 1.0, 5.0):
                            yield drawn_run(replace(key, routers=4, staleness_s=staleness_s))
