"""The product score: the default."""

from dataclasses import dataclass

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class LMetric:
    """score = (queued + new prefill tokens) x (batch size + 1)   [token x request].

    The KV$ term and the load term are multiplied, so a constant factor on either changes no order
    and there is nothing to tune. The arriving request counts itself, so an idle instance never
    zeroes the product. Source: "Simple is Better: Multiplication May Be All You Need for LLM
    Request Scheduling", arXiv 2603.15202. An instance without an engine report scores by what is
    reserved on it. Where devices differ, the tokens of each count by how slow its prefill is: its
    first factor then is a time, of the fastest one's tokens.

    The reservation takes this minimum again with the counters of the moment (`ts1_reserve`), so
    routers that decide at once do not herd.
    """

    name: str = "lmetric"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        del request  # its length is in new_prefill_tokens
        prefill_tokens = fleet.queued_prefill_tokens + fleet.new_prefill_tokens
        product = prefill_tokens * (fleet.batch_size + 1)
        return product.astype(float) if fleet.slowness is None else product * fleet.slowness / 1000
