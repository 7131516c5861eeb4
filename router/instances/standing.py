"""When an instance is ejected, and when it comes back; pure.

                    failures in a row          lease over, probe answered          served
    in service ─────────────────▶ ejected ─────────────────────────▶ on trial ────▶ in service
         ▲                         │   ▲                                │
         └──── served meanwhile ───┘   └────────── one failure ─────────┘

Every ejection ends by itself: with its lease a probe is due, a failed one ejects again, and leases
grow to a bound only. Whoever serves a request that was sent after the ejection is back at once.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from router.errors import UpstreamCause

LEASE_GROWTH: Final = 2.0
DOUBLINGS_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionRules:
    """How much an instance may fail.

    Attributes:
        failures_min: in a row, before it is ejected.
        lease_s: of the first ejection; each further one doubles it.
        lease_max_s: bound of leases, and the good time after which the next one is a first again.
        ratio_max: most of the instances that may be left out at once.
    """

    failures_min: int = 3
    lease_s: float = 5.0
    lease_max_s: float = 60.0
    ratio_max: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a router has seen of one instance; times are monotonic seconds.

    Attributes:
        failures_count: in a row.
        failed_s: the last of them.
        cause: of that one.
        ejections_count: without a good time between them.
        ejected_s: start of the present ejection, or of the last one.
        until_s: end of the lease of the present ejection; None: not ejected.
        on_trial: it came back by a probe and has served nothing since.
    """

    failures_count: int = 0
    failed_s: float = -math.inf
    cause: UpstreamCause | None = None
    ejections_count: int = 0
    ejected_s: float = -math.inf
    until_s: float | None = None
    on_trial: bool = False

    @property
    def ejected(self) -> bool:
        """Whether it is left out, as long as enough others are there."""
        return self.until_s is not None

    def probe_due(self, now_s: float) -> bool:
        """Whether the lease of its ejection is over."""
        return self.until_s is not None and now_s >= self.until_s

    def served(self, sent_s: float) -> "Standing":
        """It has ended an answer as it should.

        Args:
            sent_s: when its request was sent; one from before an ejection does not end it.
        """
        if self.ejected and sent_s < self.ejected_s:
            return self
        return replace(self, failures_count=0, until_s=None, on_trial=False)

    def failed(
        self,
        now_s: float,
        cause: UpstreamCause,
        rules: EjectionRules,
        *,
        sent_s: float,
        alive_s: float,
    ) -> "Standing":
        """A request failed.

        One that ran out of time counts only where the instance gave nobody anything meanwhile:
        else it is slow for one request, or for its load, which would grow by ejecting others. A
        failure during an ejection does not make it longer.

        Args:
            now_s: when it failed.
            cause: how.
            rules: how much is too much.
            sent_s: when the request was sent.
            alive_s: when the instance last began an answer, to whomever.
        """
        if cause.timeout and alive_s >= sent_s:
            return self
        if self.ejected:
            return replace(self, failed_s=now_s)
        noted = replace(self, failures_count=self.failures_count + 1, failed_s=now_s, cause=cause)
        if noted.on_trial or noted.failures_count >= rules.failures_min:
            return noted.ejected_again(now_s, rules)
        return noted

    def probed(self, now_s: float, rules: EjectionRules, *, healthy: bool) -> "Standing":
        """A probe that was due has been answered, or not."""
        if not self.ejected:
            return self
        if healthy:
            return replace(self, failures_count=0, until_s=None, on_trial=True)
        return self.ejected_again(now_s, rules)

    def forgiven(self, now_s: float, rules: EjectionRules) -> bool:
        """Whether nothing has to be remembered: no trouble now, and none for a good time."""
        quiet = now_s - max(self.ejected_s, self.failed_s) > _good_s(self.ejections_count, rules)
        return quiet and not self.ejected and not self.on_trial

    def ejected_again(self, now_s: float, rules: EjectionRules) -> "Standing":
        """Left out from now on; the lease is the first one's after a good time."""
        good = now_s - self.ejected_s > _good_s(self.ejections_count, rules)
        count = 1 if good and not self.ejected else self.ejections_count + 1
        until_s = now_s + lease_s(count, rules)
        return replace(
            self, ejections_count=count, ejected_s=now_s, until_s=until_s, on_trial=False
        )


def lease_s(ejections_count: int, rules: EjectionRules) -> float:
    """Of the n-th ejection."""
    doublings = min(max(ejections_count - 1, 0), DOUBLINGS_MAX)
    return min(rules.lease_s * LEASE_GROWTH**doublings, rules.lease_max_s)


def _good_s(ejections_count: int, rules: EjectionRules) -> float:
    """So long after the beginning of the last ejection it is forgotten."""
    return lease_s(ejections_count, rules) + rules.lease_max_s


def left_out_max(instances_count: int, rules: EjectionRules) -> int:
    """How many of so many may be left out: never all of them."""
    return max(0, min(int(instances_count * rules.ratio_max), instances_count - 1))
