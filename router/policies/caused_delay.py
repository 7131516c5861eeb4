"""The delay that a request has and causes, in tokens of prefill."""

from dataclasses import dataclass

from router.snapshot import FleetSnapshot, RequestView, Scores


@dataclass(frozen=True, slots=True)
class CausedDelay:
    """score = queued + new prefill tokens + new prefill tokens x batch size   [token].

    The request waits for what is queued and for its own prefill, and each request of the batch
    pauses while that is computed: a sum of waits in one unit, so there is nothing to weigh. It is
    what the sum over instances of queued tokens x batch size grows by. Against the product it
    minds queues less and hits more: better where most of a prompt is history and queues are short
    (agents), worse on long prompts near saturation; see docs/policy_search.md.
    """

    name: str = "caused_delay"

    def __call__(self, request: RequestView, fleet: FleetSnapshot) -> Scores:
        """Score every instance."""
        del request  # its length is in new_prefill_tokens
        delay = fleet.queued_prefill_tokens + fleet.new_prefill_tokens * (fleet.batch_size + 1)
        return delay.astype(float) if fleet.slowness is None else delay * fleet.slowness / 1000
