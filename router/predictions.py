"""How right the index is: hit tokens at the decision against the cached tokens engines report.

Compared is every request whose answer tells cached tokens, with one prompt and one choice, decided
with the index and the ledger. It is exact when both are the same number; over when more was
predicted than the engine found, under when less. An event after the index was asked and before the
engine admits the request explains a difference, which the sidecar judges; here every one counts.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from indexer.contract.limits import BLOCK_HASH_BYTES, NOTICE_BLOCKS_MAX
from indexer.contract.records import Notice
from router import telemetry
from router.index.notice_queue import NoticeQueue
from router.request_record import RequestRecord
from router.requests.api_call import ApiCall
from router.snapshot import Decision
from router.telemetry import instance_label

WINDOW_S: Final = 600.0
STEP_S: Final = 30.0
"""The window slides in steps, so that it costs the same however many requests are in it."""

TEND_S: Final = 1.0
NAMED_MAX: Final = 8192
"""Instances compared and not yet seen to have left; `run` forgets those that have."""

CompletenessByFleet = Callable[[], Mapping[str, Mapping[str, float]]]
"""Model scope of each fleet -> label of each instance -> completeness of its index, 0..1."""


class Verdict(StrEnum):
    """A prediction against what happened."""

    EXACT = "exact"
    OVER = "over"
    UNDER = "under"


@dataclass(slots=True)
class Tally:
    """Sums over compared requests."""

    compared: int = 0
    exact: int = 0
    over: int = 0
    under: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0

    def add(self, other: "Tally") -> None:
        """Add another one's."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def view(self) -> dict[str, float | int | None]:
        """For operators; ratios are None while nothing was compared."""
        prompt = self.prompt_tokens or None
        return {
            "compared": self.compared,
            "exact_ratio": self.exact / self.compared if self.compared else None,
            "over": self.over,
            "under": self.under,
            "hit_ratio_predicted": self.predicted_tokens / prompt if prompt else None,
            "hit_ratio_actual": self.cached_tokens / prompt if prompt else None,
        }


@dataclass(slots=True)
class Window:
    """Tallies of the last WINDOW_S, by steps of STEP_S."""

    steps: deque[tuple[int, Tally]] = field(default_factory=deque)

    def add(self, now_s: float, one: Tally) -> None:
        """Count a request at this time."""
        step = int(now_s // STEP_S)
        if not self.steps or self.steps[-1][0] != step:
            self.steps.append((step, Tally()))
        self.steps[-1][1].add(one)
        self._slide(now_s)

    def sums(self, now_s: float) -> Tally:
        """What the window holds at this time."""
        self._slide(now_s)
        total = Tally()
        for _, tally in self.steps:
            total.add(tally)
        return total

    def _slide(self, now_s: float) -> None:
        oldest = (now_s - WINDOW_S) // STEP_S
        while self.steps and self.steps[0][0] <= oldest:
            self.steps.popleft()


class Predictions:
    """Compares, exports, and tells sidecars of engine reports that differ.

    Args:
        notices: to sidecars.
        clock: monotonic seconds.
    """

    def __init__(self, notices: NoticeQueue, clock: Callable[[], float] = time.monotonic) -> None:
        self._notices = notices
        self._clock = clock
        self._fleets: dict[str, Window] = {}
        self._instances: dict[tuple[str, str], Window] = {}
        self._complete: set[tuple[str, str]] = set()

    def settle(
        self, call: ApiCall, decision: Decision, hashes: bytes, record: RequestRecord
    ) -> None:
        """Compare a request at its end, where it can be.

        Args:
            call: the request.
            decision: with the prediction.
            hashes: chain of the prompt's canonical block hashes.
            record: with what the engine reported; its verdict is set.
        """
        actual_tokens = record.cached_tokens
        if actual_tokens is None or decision.degraded:
            return
        if decision.approximate:
            fleet = decision.snapshot.fleet.model_scope
            telemetry.APPROXIMATE_HIT_TOKENS.labels(fleet).inc(decision.hit_tokens)
            telemetry.APPROXIMATE_CACHED_TOKENS.labels(fleet).inc(actual_tokens)
            return
        if record.degraded:
            return
        if call.prompts_count != 1 or call.choices_count != 1 or not call.tells_cached_tokens:
            return
        record.prediction = self._compare(decision, actual_tokens)
        notice = notice_of(decision, hashes, actual_tokens) if call.reads_prefixes else None
        if notice is not None:
            fleet_id = decision.snapshot.fleet.fleet_id
            self._notices.tell(fleet_id, decision.slot, decision.generation, notice)

    def computed(self, decision: Decision, hashes: bytes) -> None:
        """An answer has begun, so its engine has computed the prompt: tell who cannot see it.

        Args:
            decision: where it was sent; nothing is told of what the engine's own events tell.
            hashes: chain of the prompt, of token blocks or of text chunks.
        """
        notice = computed_notice(decision, hashes) if decision.approximate and hashes else None
        if notice is not None:
            fleet_id = decision.snapshot.fleet.fleet_id
            self._notices.tell(fleet_id, decision.slot, decision.generation, notice)

    def _compare(self, decision: Decision, actual_tokens: int) -> Verdict:
        predicted_tokens = _predicted(decision, actual_tokens)
        verdict = _verdict(predicted_tokens, actual_tokens)
        fleet = decision.snapshot.fleet.model_scope
        instance = instance_label(decision.instance.instance_id)
        one = Tally(
            compared=1,
            exact=verdict == Verdict.EXACT,
            over=verdict == Verdict.OVER,
            under=verdict == Verdict.UNDER,
            prompt_tokens=decision.prompt_tokens,
            predicted_tokens=predicted_tokens,
            cached_tokens=actual_tokens,
        )
        now_s = self._clock()
        if len(self._instances) >= NAMED_MAX:
            self._forget(set(self._instances))
        self._instances.setdefault((fleet, instance), Window()).add(now_s, one)
        self._fleets.setdefault(fleet, Window()).add(now_s, one)
        telemetry.PREDICTIONS.labels(fleet, instance, verdict).inc()
        telemetry.COMPARED_PROMPT_TOKENS.labels(fleet, instance).inc(one.prompt_tokens)
        telemetry.COMPARED_PREDICTED_TOKENS.labels(fleet, instance).inc(one.predicted_tokens)
        telemetry.CACHED_TOKENS_ACTUAL.labels(fleet, instance).inc(one.cached_tokens)
        return verdict

    # -- what operators see -----------------------------------------------------------------------

    def annotate(self, fleet_view: dict[str, Any]) -> None:
        """Add `predictions` to every fleet and instance of `IndexClient.fleet_view`."""
        now_s = self._clock()
        for fleet in fleet_view["fleets"]:
            scope = fleet["model_scope"]
            fleet["predictions"] = self._fleets.get(scope, Window()).sums(now_s).view()
            for instance in fleet["instances"]:
                key = scope, instance_label(instance["instance_id"])
                window = self._instances.get(key, Window())
                instance["predictions"] = window.sums(now_s).view()

    async def run(self, completeness: CompletenessByFleet) -> None:
        """Keep gauges fresh and forget who has left, until cancelled."""
        while True:
            self.tend(completeness())
            await asyncio.sleep(TEND_S)

    def tend(self, completeness: Mapping[str, Mapping[str, float]]) -> None:
        """Once: set the gauges of these fleets and instances, remove the others' series."""
        present = {(fleet, name) for fleet, names in completeness.items() for name in names}
        for fleet, instance in present:
            ratio = completeness[fleet][instance]
            telemetry.COMPLETENESS.labels(fleet, instance).set(ratio)
        self._forget((self._complete | set(self._instances)) - present)
        self._complete = present
        for fleet in set(self._fleets) - set(completeness):
            del self._fleets[fleet]
            telemetry.EXACT_RATIO.remove(fleet)
        now_s = self._clock()
        for fleet, window in self._fleets.items():
            sums = window.sums(now_s)
            ratio = sums.exact / sums.compared if sums.compared else float("nan")
            telemetry.EXACT_RATIO.labels(fleet).set(ratio)

    def _forget(self, gone: AbstractSet[tuple[str, str]]) -> None:
        for key in gone:
            self._instances.pop(key, None)
            for verdict in Verdict:
                telemetry.PREDICTIONS.remove(*key, verdict)
            for metric in telemetry.BY_INSTANCE:
                metric.remove(*key)


def _predicted(decision: Decision, actual_tokens: int) -> int:
    """Hit tokens; engines may count what they load from a tier as cached, all of it or a part."""
    hit_tokens = decision.hit_tokens
    return min(max(actual_tokens, hit_tokens), hit_tokens + decision.tier_tokens)


def _verdict(predicted_tokens: int, actual_tokens: int) -> Verdict:
    if predicted_tokens == actual_tokens:
        return Verdict.EXACT
    return Verdict.OVER if predicted_tokens > actual_tokens else Verdict.UNDER


def notice_of(decision: Decision, hashes: bytes, actual_tokens: int) -> Notice | None:
    """What the sidecar should know of a comparison; None when the index was not wrong.

    A hit that was predicted only because of a request in flight and did not come is that request's
    doing: the index promised less.
    """
    by_index_tokens = decision.hit_tokens - decision.in_flight_tokens
    if by_index_tokens <= actual_tokens <= decision.hit_tokens + decision.tier_tokens:
        return None
    block_size_tokens = decision.snapshot.fleet.block_size_tokens
    deeper_blocks = -(-max(by_index_tokens, actual_tokens) // block_size_tokens)
    return Notice(
        decided_s=decision.snapshot.looked_s,
        predicted_tokens=by_index_tokens,
        actual_tokens=actual_tokens,
        hashes=hashes[: (deeper_blocks + 1) * BLOCK_HASH_BYTES],
    )


def computed_notice(decision: Decision, hashes: bytes) -> Notice:
    """What the sidecar should learn: from the last block that the index has on, or the whole chain.

    A chain longer than a notice is told in part, its beginning first.
    """
    block_size_tokens = decision.snapshot.fleet.block_size_tokens
    by_index_tokens = decision.hit_tokens - decision.in_flight_tokens
    first_block = max(by_index_tokens // block_size_tokens - 1, 0)
    start = first_block * BLOCK_HASH_BYTES
    return Notice(
        decided_s=decision.snapshot.looked_s,
        predicted_tokens=0,
        actual_tokens=0,
        hashes=hashes[start : start + NOTICE_BLOCKS_MAX * BLOCK_HASH_BYTES],
        computed=True,
        first_block=first_block,
    )
