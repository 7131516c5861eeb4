"""Why a published claim fares as it does in the lab, by its identity in `report.claims.CLAIMS`.

Written for the default scenario and that of all policies (`matrix`); the report gives them where a
claim comes out partly or not. Where a text says "likely", no run isolates the cause.
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
_TUNED_WITH_HINDSIGHT = (
    "The rival's weight is the best of five for the workload at hand: 10 % on the API mix, 30 on "
    "the conversation trace and hot prefixes, 70 on agents, 90 on the chat mix. Beside the right "
    "one little is left to gain; the wrong one costs much (agents, half load: mean TTFT of "
    "linear_90 is ten times that of linear_70), and that choice is what a product spares."
)

WHYS: Final[dict[str, str]] = {
    "vllm_ttft": _LITTLE_REUSE,
    "vllm_tpot": _FLAT_STEPS,
    "tuned_ttft": (
        "Where all instances soon hold what is hot (hot prefixes, -13 %), hits are alike and only "
        "balance counts, which the weighted score keeps too."
    ),
    "tuned_tpot": _FLAT_STEPS,
    "sweep_ttft": _TUNED_WITH_HINDSIGHT,
    "sweep_tpot": f"{_TUNED_WITH_HINDSIGHT} {_FLAT_STEPS}",
    "new_tokens_p50": (
        "On agents and the chat mix half of the requests find nearly all of their prompt under "
        "either factor, and P50 is a step or two of the engine; 1 - hit ratio follows hits more "
        "and so has more of them."
    ),
    "new_tokens_p95": (
        "-33 to -42 % on the chat and API mixes and hot prefixes, 0 to -20 % on the others: there "
        "the slowest prompts are likely the longest ones, whose own prefill no choice shortens."
    ),
    "past_saturation": (
        "Where sessions come back (chat, agents), following hits more keeps the caches' content "
        "longer once everything queues."
    ),
    "detector": (
        "The product spreads a steadily hot prefix by itself: queue and batch of its holders grow "
        "until somebody else wins, who holds it from then on, so a few requests after its "
        "beginning nothing is left to mend. A long prefix that one instance holds before it is "
        "hot does mislead it (scenario `detector`). What follows hits alone needs the detector "
        "most: at 40 requests/s, 60 % of them with one prefix, it takes mean TTFT of max_hit from "
        "7.9 to 0.09 s."
    ),
    "smetric_peak": (
        "With a tier a local miss costs little: at 110 % on generated agents smetric hits 78 % of "
        "the tokens locally and lmetric 70 %, which loads the rest and is 5 % faster. On the plain "
        "fleet smetric's peak is 6 to 12 % above lmetric's, and hit_ratio_product's, which "
        "follows hits further, 20 % above smetric's on generated agents. How long a session may "
        "wait where it is (SLACK) is not published: with 2 instead of 1, mean TTFT at 90 % load is "
        "a fifth lower."
    ),
    "smetric_grows": (
        "Loads are fractions of what the plain fleet bears. With a tier 110 % of that is not past "
        "saturation (generated agents: mean TTFT 0.23 s), and at 200 % nearly every answer misses "
        "the SLO under every policy (7.9 s), so that no gain is left to see. On the plain fleet, "
        "past saturation nearly every follow-up's expected TTFT is above the bound, so sessions "
        "move on and leave their KV$ behind: smetric hits 47 % of the tokens of generated agents, "
        "lmetric 40 %, hit_ratio_product 77 %."
    ),
    "smetric_prefill": (
        "smetric's peak is 8 % above lmetric's, near the paper's figure, but the best other policy "
        "is one that the paper does not have: hit_ratio_product is within 3 %. In mean TTFT the "
        "gain is larger: at 90 % 0.86 s, hit_ratio_product 0.87, lmetric 1.58, least_loaded 3.78."
    ),
    "reuse": (
        "How far lmetric's reuse falls behind grows with the load: on agents by 3 to 8 % at half "
        "load, 9 to 24 % at 90 % and 38 to 49 % past saturation, as queues come to outweigh hits."
    ),
    "balancing": (
        "A load is not free: it makes the step that admits a request longer by its latency and "
        "tokens / bandwidth, for all who decode beside it, and answers are not in the tier, so "
        "that whoever moves computes those again. At 110 % on generated agents least_loaded loads "
        "59 % of the tokens, lmetric 24 %: mean TTFT 0.37 against 0.23 s, mean TPOT 20.2 against "
        "18.2 ms, so likely many answers miss a TPOT of 20 ms by little."
    ),
}
