"""One file per policy. To add one: its file, one line in POLICIES, one table test."""

from typing import Final

from router.policies.base import Policy
from router.policies.least_loaded import LeastLoaded
from router.policies.lmetric import LMetric
from router.policies.max_hit import MaxHit
from router.policies.round_robin import RoundRobin
from router.policies.vllm_v1 import VllmV1

POLICIES: Final[dict[str, Policy]] = {
    policy.name: policy
    for policy in (
        LMetric(),
        LeastLoaded(),
        RoundRobin(),
        VllmV1(),
        MaxHit(),
        MaxHit("max_hit_bounded", load_ceiling_ratio=1.25),
    )
}


def policy_by_name(name: str) -> Policy:
    """Find a policy.

    Raises:
        ValueError: no policy has this name; the message lists those that exist.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy `{name}`; known policies: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
