"""One file per policy or close family. To add one: its file, one line in POLICIES, one table test.

And its measure in words, in `router/http/dashboard/explanation.py`.
"""

from collections.abc import Callable
from typing import Final

from router.policies.aibrix import Aibrix
from router.policies.bailian import Bailian
from router.policies.base import Policy, for_router
from router.policies.caused_delay import CausedDelay
from router.policies.chance import PowerOfTwo, Random
from router.policies.dynamo import Dynamo
from router.policies.hit_ratio_product import HitRatioProduct
from router.policies.least_loaded import LeastLoaded
from router.policies.least_prefill import LeastPrefill
from router.policies.linear import SWEEP
from router.policies.llm_d_scorers import LlmDScorers
from router.policies.llm_d_sticky import LlmDSticky
from router.policies.lmetric import LMetric
from router.policies.lmetric_artifact import LMetricArtifact
from router.policies.max_hit import MaxHit
from router.policies.preble import Preble
from router.policies.round_robin import RoundRobin
from router.policies.session_affinity import SessionAffinity
from router.policies.smetric import SMetric
from router.policies.smg import SmgCacheAware
from router.policies.vllm_v1 import VllmV1

_ALL: Final[tuple[Policy, ...]] = (
    LMetric(),
    LMetricArtifact(),
    SMetric(),
    LeastLoaded(),
    RoundRobin(),
    Random(),
    PowerOfTwo(),
    VllmV1(),
    LeastPrefill(),
    HitRatioProduct(),
    CausedDelay(),
    MaxHit(),
    MaxHit("max_hit_bounded", load_ceiling_ratio=1.25),
    *SWEEP,
    Bailian(),
    Aibrix(),
    Dynamo(),
    LlmDScorers(),
    LlmDSticky(),
    SmgCacheAware(),
    Preble(),
    SessionAffinity(),
)

POLICIES: Final[dict[str, Policy]] = {policy.name: policy for policy in _ALL}
"""The rules, which remember nothing; what a router uses is `router_policies`."""


def router_policies(clock: Callable[[], float]) -> dict[str, Policy]:
    """All policies for one router: those that remember, each with a memory of this router's own.

    Args:
        clock: of the memories, monotonic seconds.
    """
    return {name: for_router(policy, clock) for name, policy in POLICIES.items()}


def policy_by_name(name: str) -> Policy:
    """Find a policy.

    Raises:
        ValueError: no policy has this name; the message lists those that exist.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy `{name}`; known policies: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
