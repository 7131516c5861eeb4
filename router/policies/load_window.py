"""What a router has sent to each instance in the last three minutes: Preble's memory."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.contract.identifiers import InstanceId
from indexer.contract.records import InstanceRecord
from router.snapshot import Column, Decision, RequestView

WINDOW_S: Final = 180.0
ENTRIES_MAX: Final = 1 << 16
"""360 requests a second for three minutes, about 20 MB; beyond, the oldest are forgotten early."""

PREFILL_TOKENS_PER_S: Final = 0.9 / 0.10842571e-3
"""Slope of Preble's fit (Mistral 7B on an A6000), where an instance's own rate is not known."""

DECODE_S: Final = 45 * 0.15
"""Preble's first guess at an answer: 45 tokens of 150 ms; until answers have been seen."""


@dataclass(slots=True)
class Sent:
    """One decision; `decode_s` is None until its end has told it."""

    decided_s: float
    key: tuple[int, InstanceId]
    prefill_s: float
    decode_s: float | None = None


@dataclass(slots=True)
class Sum:
    """Of decisions: how many, and of how many the decode time is known."""

    count: int = 0
    prefill_s: float = 0.0
    decoded_count: int = 0
    decode_s: float = 0.0

    def add(self, sent: Sent, sign: int) -> None:
        """Add it, or with sign -1 take it off."""
        self.count += sign
        self.prefill_s += sign * sent.prefill_s
        if sent.decode_s is not None:
            self.add_decode(sent.decode_s, sign)

    def add_decode(self, decode_s: float, sign: int) -> None:
        """Likewise, of a decode time alone."""
        self.decoded_count += sign
        self.decode_s += sign * decode_s


class LoadWindow:
    """The decisions of one router of the last WINDOW_S.

    What is older than the window is forgotten whenever the window is looked at. A request is known
    by its sequence: its id is the client's, who may choose the same for many.

    Args:
        clock: seconds that never go back and never stand still: a snapshot's do, degraded.
        entries_max: decisions remembered; of more, the oldest are forgotten.
    """

    def __init__(self, clock: Callable[[], float], *, entries_max: int = ENTRIES_MAX) -> None:
        self._clock = clock
        self._entries_max = entries_max
        self._sent: deque[Sent] = deque()
        self._by_key: dict[tuple[int, InstanceId], Sent] = {}
        self._sums: dict[InstanceId, Sum] = {}
        self._total = Sum()

    def __len__(self) -> int:
        return len(self._sent)

    def decided(self, request: RequestView, decision: Decision) -> None:
        """Enter a decision; one told before changes nothing."""
        instance = decision.instance
        key = (request.sequence, instance.instance_id)
        if key in self._by_key:
            return
        now_s = self._clock()
        rate = instance.prefill_tokens_per_s or PREFILL_TOKENS_PER_S
        sent = Sent(now_s, key, decision.new_prefill_tokens / rate)
        self._sent.append(sent)
        self._by_key[key] = sent
        self._sums.setdefault(instance.instance_id, Sum()).add(sent, 1)
        self._total.add(sent, 1)
        self._forget(now_s)

    def ended(self, request: RequestView, decision: Decision, decode_s: float | None) -> None:
        """Note how long it decoded, if it is in the window still and that was not known."""
        instance_id = decision.instance.instance_id
        sent = self._by_key.get((request.sequence, instance_id))
        if sent is None or sent.decode_s is not None or decode_s is None:
            return
        sent.decode_s = decode_s
        self._sums[instance_id].add_decode(decode_s, 1)
        self._total.add_decode(decode_s, 1)

    def loads(self, instances: Sequence[InstanceRecord]) -> tuple[Column, npt.NDArray[np.float64]]:
        """Requests sent to each instance, and the time they take to prefill and decode   [s].

        Of those whose decode time is not known, the mean of those whose is, anywhere.
        """
        self._forget(self._clock())
        total = self._total
        guess_s = total.decode_s / total.decoded_count if total.decoded_count else DECODE_S
        sums = [self._sums.get(record.instance_id) or Sum() for record in instances]
        costs_s = [
            one.prefill_s + one.decode_s + (one.count - one.decoded_count) * guess_s for one in sums
        ]
        return np.array([one.count for one in sums], np.int64), np.array(costs_s)

    def _forget(self, now_s: float) -> None:
        sent = self._sent
        while sent and (sent[0].decided_s <= now_s - WINDOW_S or len(sent) > self._entries_max):
            oldest = sent.popleft()
            del self._by_key[oldest.key]
            instance_id = oldest.key[1]
            self._sums[instance_id].add(oldest, -1)
            self._total.add(oldest, -1)
            if not self._sums[instance_id].count:
                del self._sums[instance_id]  # and with it what subtracting has left of rounding
        if not sent:
            self._total = Sum()
