"""The last decisions of this router process, for whoever asks why a request went where it went."""

import math
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from router.decode_leg import DECODE_LEG
from router.http.dashboard.explanation import MEASURE, PRODUCT, arithmetic, explain, hot_class_view
from router.request_record import RequestRecord
from router.snapshot import Candidate, Decision

KEPT_MAX: Final = 512
"""Requests."""

SCORES_KEPT_MAX: Final = 65_536
"""Of all of them together, about 100 bytes each: the ring of a large fleet holds fewer requests."""

SHOWN_MAX: Final = 100
"""Requests in one list."""

DETAILED_MAX: Final = 4
"""Requests in one answer that shows candidates: an id that a client uses again and again."""

CANDIDATES_SHOWN_MAX: Final = 64
"""Of one attempt, the chosen one and the best of the others."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A request that was decided."""

    sequence: int
    at_s: float  # wall clock of the first decision
    record: RequestRecord
    scores_count: int = 0


class RecentDecisions:
    """A ring of requests; what became of each is read from its record when somebody looks.

    Args:
        clock: wall clock seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[_Kept] = deque()
        self._sequence = 0
        self._scores_count = 0
        self.router_id = uuid.uuid4().hex[:8]
        """Tells this process from others behind the same port."""

    def add(self, record: RequestRecord) -> None:
        """Keep a request of which a decision was made: its first one, or another after a retry."""
        if len(record.decisions) == 1:
            self._sequence += 1
            self._kept.append(_Kept(sequence=self._sequence, at_s=self._clock(), record=record))
        # A retry counts for the newest request, whosever it is: the sum is what is bounded.
        scores_count = len(record.decisions[-1].scores)
        if self._kept:
            self._kept[-1].scores_count += scores_count
            self._scores_count += scores_count
        while len(self._kept) > KEPT_MAX or (
            self._scores_count > SCORES_KEPT_MAX and len(self._kept) > 1
        ):
            self._scores_count -= self._kept.popleft().scores_count

    def newest(self, count_max: int = SHOWN_MAX) -> dict[str, Any]:
        """The last requests, newest first, without candidates."""
        count = min(count_max, SHOWN_MAX, len(self._kept))
        return self._head() | {
            "decisions": [_summary(self._kept[-1 - place]) for place in range(count)]
        }

    def of_request(self, request_id: str) -> dict[str, Any]:
        """What is kept of this request id, newest first, with all attempts and candidates."""
        found = [one for one in reversed(self._kept) if one.record.request_id == request_id]
        return self._head() | {"decisions": [_detail(one) for one in found[:DETAILED_MAX]]}

    def _head(self) -> dict[str, Any]:
        return {
            "router_id": self.router_id,
            "now_s": self._clock(),
            "kept": len(self._kept),
            "kept_max": KEPT_MAX,
        }


def _summary(kept: _Kept) -> dict[str, Any]:
    record = kept.record
    return {
        "sequence": kept.sequence,
        "at_s": round(kept.at_s, 3),
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "model": record.model,
        "stream": record.stream,
        "outcome": "running" if record.e2e_s is None else record.outcome,
        "status": record.status,
        "ttft_s": _rounded(record.ttft_s),
        "e2e_s": _rounded(record.e2e_s),
        "attempts_count": len(record.decisions),
        "retries_count": record.retries_count,
        "degraded_cause": record.degraded_cause,
        "cached_tokens": record.cached_tokens,
        **_chosen(_telling(record.decisions)),
        "instance_id": record.decisions[-1].instance.instance_id,
        "prefill_instance_id": record.prefill_instance_id,
    }


def _telling(decisions: list[Decision]) -> Decision:
    """The last one; of two legs the first, whose hits and queue were weighed."""
    firsts = (one for one in reversed(decisions) if one.policy != DECODE_LEG.name)
    return next(firsts, decisions[-1])


def _chosen(decision: Decision) -> dict[str, Any]:
    return {
        "policy": decision.policy,
        "instance_id": decision.instance.instance_id,
        "prompt_tokens": decision.prompt_tokens,
        "hit_tokens": decision.hit_tokens,
        "in_flight_tokens": decision.in_flight_tokens,
        "new_prefill_tokens": decision.new_prefill_tokens,
        "queued_prefill_tokens": decision.queued_prefill_tokens,
        "batch_size": decision.batch_size,
        "score": _finite(decision.score),
        "approximate": decision.approximate,
        "hot_class": hot_class_view(decision.hot_class),
        "candidates_count": len(decision.scores),
    }


def _detail(kept: _Kept) -> dict[str, Any]:
    record = kept.record
    return _summary(kept) | {
        "attempts": [_attempt(one, record.held_by) for one in record.decisions]
    }


def _attempt(decision: Decision, held_by: str | None) -> dict[str, Any]:
    return _chosen(decision) | {
        "measure": MEASURE.get(decision.policy),
        "explanation": explain(decision, held=decision.instance.instance_id == held_by),
        "snapshot_age_s": _rounded(decision.snapshot_age_s),
        "degraded": decision.degraded,
        "degraded_cause": decision.degraded_cause,
        "candidates": [
            _candidate(one, decision.policy) for one in decision.candidates[:CANDIDATES_SHOWN_MAX]
        ],
    }


def _candidate(one: Candidate, policy: str) -> dict[str, Any]:
    return {
        "instance_id": one.instance_id,
        "hit_tokens": one.hit_tokens,
        "in_flight_tokens": one.in_flight_tokens,
        "new_prefill_tokens": one.new_prefill_tokens,
        "queued_prefill_tokens": one.queued_prefill_tokens,
        "batch_size": one.batch_size,
        "score": _finite(one.score),
        "arithmetic": arithmetic(one) if policy == PRODUCT else None,
    }


def _finite(score: float) -> float | None:
    """JSON has no infinity; None is never."""
    return score if math.isfinite(score) else None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
