"""Pure: one prefix much hotter than its holders can bear, or not.

Requests of class c share a prefix. With M holders of it in a fleet of N, and x the class's share of
requests, a product score can pile c onto its holders only if x / (1 - x) > M / (N - M); it does so
while the prompt is much longer than what a holder still has to prefill of it (LMetric, arXiv
2603.15202, "when multiplication can fail"). Single-turn requests, Poisson arrivals.

`TRIGGERING`: x = 0.6 and a prefix of 8,192 tokens before messages of 200, so that one holder of 16
(M / (N - M) = 0.07) keeps winning until it has about 5 requests waiting. `QUIET`: the same prefix
with x = 0.04, which is no trouble to a single holder in fleets of up to 25 instances. `SUDDEN`: a
long prefix that one instance has held for a while; hits save so much that the product, too, keeps
to few holders, whose every step reads its KV$.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import FreshIds
from loadgen.workloads.growing import GrowingPrompt, Lengths, blocks_of, check

_SEED_STREAM = 19


@dataclass(frozen=True, kw_only=True)  # no slots: jsonargparse reads its fields
class HotPrefix:
    """Shape of the workload. Raises WorkloadError for values that make none.

    Args:
        request_rate: requests per second.
        hot_ratio: share x of requests with the hot prefix, 0..1, while it is hot.
        hot_prefix_tokens: its length, rounded to full blocks.
        hot_from_s: the prefix becomes hot at this time; before, its requests are cold ones.
        hot_until_s: it ceases to be hot at this time; None: never.
        held_at_start: the first request of all has the hot prefix, so that one instance holds it
            when it becomes hot.
        cold_prefixes_count: prefixes that the other requests share, equally popular.
        cold_prefix_tokens: their length.
        message_tokens_median: lognormal length of what follows a prefix.
        message_tokens_sigma: its sigma.
        answer_tokens_median: lognormal length of answers.
        answer_tokens_sigma: its sigma.
        block_size_tokens: grain of block ids.
    """

    request_rate: float = 20.0
    hot_ratio: float = 0.6
    hot_prefix_tokens: int = 8192
    hot_from_s: float = 0.0
    hot_until_s: float | None = None
    held_at_start: bool = False
    cold_prefixes_count: int = 64
    cold_prefix_tokens: int = 1024
    message_tokens_median: float = 200.0
    message_tokens_sigma: float = 0.6
    answer_tokens_median: float = 100.0
    answer_tokens_sigma: float = 0.6
    block_size_tokens: int = 64

    def __post_init__(self) -> None:
        check("hot_prefix.request_rate", self.request_rate, least=1e-6)
        check("hot_prefix.hot_ratio", self.hot_ratio, most=1)
        check("hot_prefix.cold_prefixes_count", self.cold_prefixes_count, least=1)
        check("hot_prefix.block_size_tokens", self.block_size_tokens, least=1)

    @property
    def quiet_instances_max(self) -> int:
        """Largest fleet in which the hot class cannot overload a single holder.

        x / (1 - x) <= 1 / (N - 1); 1 when every request is hot.
        """
        return 1 + int((1 - self.hot_ratio) / self.hot_ratio) if self.hot_ratio else 1 << 30


TRIGGERING = HotPrefix()
QUIET = HotPrefix(hot_ratio=0.04)
SUDDEN = HotPrefix(
    hot_prefix_tokens=32_768,
    hot_from_s=8.0,
    held_at_start=True,
    message_tokens_median=60.0,
)


def generate_hot_prefix(spec: HotPrefix, *, requests_count: int, seed: int) -> Iterator[TraceRow]:
    """Rows in order of arrival, category "hot" or "cold"; equal arguments give equal rows."""
    generator = np.random.default_rng([seed, _SEED_STREAM])
    ids = FreshIds()
    size = spec.block_size_tokens
    hot = ids.take(blocks_of(spec.hot_prefix_tokens, size))
    cold_blocks = blocks_of(spec.cold_prefix_tokens, size)
    cold = [ids.take(cold_blocks) for _ in range(spec.cold_prefixes_count)]
    message = Lengths(median=spec.message_tokens_median, sigma=spec.message_tokens_sigma)
    answer = Lengths(median=spec.answer_tokens_median, sigma=spec.answer_tokens_sigma)
    until_s = float("inf") if spec.hot_until_s is None else spec.hot_until_s
    arrival_s = 0.0
    for request in range(requests_count):
        drawn_hot = bool(generator.random() < spec.hot_ratio)
        is_hot = (drawn_hot and spec.hot_from_s <= arrival_s < until_s) or (
            request == 0 and spec.held_at_start
        )
        prompt = GrowingPrompt(ids, size)
        prompt.share(hot if is_hot else cold[int(generator.integers(len(cold)))])
        prompt.grow(message.draw(generator))
        yield TraceRow(
            arrival_s=round(arrival_s, 6),
            prompt_tokens=prompt.tokens,
            output_tokens=answer.draw(generator),
            block_ids=tuple(prompt.block_ids),
            block_size_tokens=size,
            session_id=f"request-{request}",
            turn=0,
            category="hot" if is_hot else "cold",
        )
        arrival_s += float(generator.exponential(1 / spec.request_rate))
