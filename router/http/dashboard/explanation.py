"""Why a request went where it went, in words and in numbers. Pure."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from router.policies.linear import SWEEP
from router.snapshot import Candidate, Decision, HotClass

PRODUCT: Final = "lmetric"
"""The policy whose score is (queued + new prefill tokens) x (batch size + 1)."""

SESSIONS: Final = "smetric"
"""The policy whose score is the product where a session begins or moves."""

MEASURE: Final[Mapping[str, str]] = {
    PRODUCT: "(queued + new prefill tokens) × (batch size + 1)",
    "lmetric_artifact": "(queued + prompt - held tokens) × (batch size + 1), ties by slot",
    SESSIONS: "tokens not held, ties by expected TTFT: the session stays where most of it is",
    "least_loaded": "batch size",
    "least_prefill": "queued + new prefill tokens, ties by batch size",
    "caused_delay": "queued + new prefill tokens × (batch size + 1)",
    "hit_ratio_product": "(1 - hit ratio) × (batch size + 1)",
    "random": "a draw for this request",
    "round_robin": "turns still to wait",
    "power_of_two": "batch size of two drawn for this request",
    "vllm_v1": "4 × waiting + running requests",
    "max_hit": "new prefill tokens, ties by batch size",
    "max_hit_bounded": "new prefill tokens, ties by batch size, below a load ceiling",
    **{rule.name: f"{rule.weight_percent} % misses, the rest load" for rule in SWEEP},
    "bailian": "a draw for this request, by the weights of hits, requests and tokens",
    "aibrix": "new prefill tokens among the less loaded, or batch size when those are far apart",
    "dynamo": "blocks to prefill and blocks held",
    "llm_d_scorers": "7 - (3 × hit ratio + 2 × short queue + 2 × free KV$)",
    "llm_d_sticky": "queued + new prefill tokens, of who holds the prompt until saturated",
    "smg_cache_aware": "new prefill tokens, ties by batch size; or batch size when overloaded",
    "preble": "new prefill tokens, ties by recent requests; or seconds of recent work",
    "decode_leg": "(batch size + 1) / free share of the KV$",
    "session_affinity": "place in the session's order, below a load ceiling",
}
"""What each policy's score is made of."""


def short_name(instance_id: str) -> str:
    """The part of an instance id that people know it by: host:port/rank."""
    return instance_id.partition("#")[0]


def arithmetic(one: Candidate) -> str:
    """The product score of a candidate, written out."""
    return (
        f"({one.queued_prefill_tokens:,} + {one.new_prefill_tokens:,}) × "
        f"({one.batch_size:,} + 1) = {_number(one.score)}"
    )


def explain(decision: Decision, *, held: bool = False) -> str:
    """What a person who asks "why there?" is told, in one to three sentences.

    Args:
        decision: the instance, and why.
        held: it alone holds the answer that the request names.
    """
    chosen, *others = decision.candidates
    name = short_name(chosen.instance_id)
    told = []
    if decision.degraded:
        cause = f" ({decision.degraded_cause})" if decision.degraded_cause else ""
        told.append(f"Decided without the index{cause}: by the last known load, without hits.")
    if held:
        told.append(f"{name} holds the earlier answer that the request names; nobody else does.")
        return " ".join(told)
    if not others:
        told.append(f"{name} was the only instance that could take the request.")
        return " ".join(told)
    if decision.hot_class is not None and decision.hot_class.taken_out:
        told.append(_without_holders(decision.hot_class))
    told.append(f"{name} {_standing(decision, chosen)}: {_terms(decision, chosen)}.")
    if decision.policy == PRODUCT and chosen.score < others[0].score:
        told.append(_compared(chosen, others))
    return " ".join(told)


def hot_class_view(hot_class: HotClass | None) -> dict[str, Any] | None:
    """A request's class as clients and operators read it."""
    if hot_class is None:
        return None
    return {
        "standing": hot_class.standing,
        "depth_blocks": hot_class.depth_blocks,
        "share": round(hot_class.share, 6),
        "holders_count": len(hot_class.holders),
    }


def _without_holders(hot_class: HotClass) -> str:
    count = len(hot_class.holders)
    return (
        f"{hot_class.share:.0%} of recent requests begin with the same {hot_class.depth_blocks:,} "
        f"blocks, which {count} instance{'' if count == 1 else 's'} held: these were no "
        "candidates, so that others come to hold them."
    )


def _standing(decision: Decision, chosen: Candidate) -> str:
    count = len(decision.scores)
    least = float(decision.scores.min())
    if chosen.score > least:
        # Redis takes the minimum among the best few by the counters of the moment of booking;
        # the others are shown with those of the lookup.
        return f"was the best of {count} instances when the request was booked"
    equals = int(np.count_nonzero(decision.scores == least))
    if equals == 1:
        return f"had the lowest score of {count} instances"
    return f"shared the lowest score of {count} instances with {equals - 1} and won the tie-break"


def _terms(decision: Decision, chosen: Candidate) -> str:
    if decision.policy == PRODUCT:
        return arithmetic(chosen)
    if decision.policy == SESSIONS and not _stays(decision):
        return f"{arithmetic(chosen)}, because its session begins or has to move"
    measure = MEASURE.get(decision.policy, f"as the policy {decision.policy} scores")
    return f"{_number(chosen.score)} ({measure})"


def _stays(decision: Decision) -> bool:
    """Whether a session's scores are tokens that are not held, and a share for ties."""
    beyond = decision.scores - (decision.prompt_tokens - decision.snapshot.hit_tokens)
    return bool(((beyond > 0) & (beyond < 1)).all())


def _compared(chosen: Candidate, others: list[Candidate]) -> str:
    """Against whoever holds more of the prompt, else against the next best."""
    deepest = max(others, key=lambda one: (one.hit_tokens, -one.score))
    if deepest.hit_tokens > chosen.hit_tokens:
        load = f"{deepest.queued_prefill_tokens:,} tokens queued and {_requests(deepest)}"
        return (
            f"{short_name(deepest.instance_id)} holds more of the prompt "
            f"({deepest.hit_tokens:,} tokens against {chosen.hit_tokens:,}), but with {load} "
            f"it scores {_number(deepest.score)}."
        )
    second = others[0]
    which = f"The next best, {short_name(second.instance_id)}, scores {_number(second.score)}"
    reasons = []
    if second.hit_tokens < chosen.hit_tokens:
        fewer = chosen.hit_tokens - second.hit_tokens
        reasons.append(f"it holds {fewer:,} tokens less of the prompt")
    if second.queued_prefill_tokens > chosen.queued_prefill_tokens:
        more = second.queued_prefill_tokens - chosen.queued_prefill_tokens
        reasons.append(f"{more:,} more tokens wait there")
    if second.batch_size > chosen.batch_size:
        reasons.append(f"it has {_requests(second)} against {chosen.batch_size:,}")
    return f"{which}: {', '.join(reasons)}." if reasons else f"{which}."


def _requests(one: Candidate) -> str:
    return f"{one.batch_size:,} request{'' if one.batch_size == 1 else 's'}"


def _number(score: float) -> str:
    if not np.isfinite(score):
        return "never"
    return f"{score:,.0f}" if score == round(score) else f"{score:,.2f}"
