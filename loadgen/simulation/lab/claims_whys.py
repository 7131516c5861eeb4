"""Why a published claim fares as it does in the lab, by its identity in `report.claims.CLAIMS`.

Written for the default scenario; where a text says "likely", no run isolates the cause.
"""

from typing import Final

_LITTLE_REUSE = (
    "On the slices of Mooncake's traces little is reused on 16 caches of 257,732 tokens, so most "
    "of TTFT is the prompt's own prefill, which no choice of instance shortens; on agent sessions, "
    "which reuse most of their prompts, the difference is near the paper's."
)
_FLAT_STEPS = (
    "Likely because a decode step of this profile costs nearly the same from a few requests on "
    "(all experts are read), so that balance and saved prefill show less in TPOT at half load; "
    "where much prefill is saved (agents) the difference exceeds the paper's."
)

WHYS: Final[dict[str, str]] = {
    "vllm_ttft": _LITTLE_REUSE,
    "vllm_tpot": _FLAT_STEPS,
    "tuned_tpot": _FLAT_STEPS,
    "past_saturation": (
        "Where sessions come back (chat, agents), following hits more keeps the caches' content "
        "longer once everything queues."
    ),
}
