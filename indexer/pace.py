"""How often a sidecar beats, so that a large fleet's heartbeats do not fill the server; pure."""

from indexer.contract.limits import HEARTBEATS_PER_S_MAX, INSTANCE_LEASE_RENEW_S
from indexer.contract.records import HeartbeatReply, SlotFlag


class Pace:
    """When the next heartbeat of one slot is due.

    What routers have reserved is in the counters without any heartbeat. It renews the lease, shows
    the load that came another way, and takes messages, all of which bear a little delay; a change
    of the slot's state does not, and while prefills are awaited every scrape sends one.
    """

    def __init__(self) -> None:
        self._sent_s = float("-inf")
        self._state: SlotFlag | None = None
        self._interval_s = 0.0

    def is_due(self, now_s: float, state: SlotFlag) -> bool:
        """Whether to send one now.

        Args:
            now_s: monotonic clock.
            state: that it would announce.
        """
        return state != self._state or now_s - self._sent_s >= self._interval_s

    def heard(self, sent_s: float, state: SlotFlag, reply: HeartbeatReply) -> None:
        """One was answered.

        Args:
            sent_s: monotonic clock when it was sent.
            state: that it announced.
            reply: the answer.
        """
        self._sent_s, self._state = sent_s, state
        interval_s = min(reply.fleet_instances_count / HEARTBEATS_PER_S_MAX, INSTANCE_LEASE_RENEW_S)
        self._interval_s = 0.0 if reply.awaited else interval_s

    def lost(self) -> None:
        """The last one was not answered, or refused: the next is due at once."""
        self._interval_s = 0.0
