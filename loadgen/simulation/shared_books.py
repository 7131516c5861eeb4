"""Counters and reservations of a fleet as the functions in Redis keep them. Pure.

The twin of `ts1_reserve`, `ts1_read`, `ts1_prefilled`, `ts1_release` and of what a heartbeat does
to counters, over the same arguments and answers, with the time passed in.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from indexer.contract.limits import BLOCK_HASH_BYTES, SIBLING_TTL_S
from indexer.contract.records import CONTEXT, COUNTERS_RECORD, FleetCounters, SlotFlag
from indexer.contract.request_classes import ClassReport
from indexer.contract.reservations import CANDIDATE_STATE, SIBLING, InFlight, context_tokens
from loadgen.simulation.shared_classes import SharedClasses

SIBLINGS_PER_PREFIX_MAX = 64  # these two as in the function
SIBLINGS_MANY = 8
_MILESTONE = 4 + BLOCK_HASH_BYTES
_USED = int(SlotFlag.USED)

OK: Final = b"ok"
MOVED: Final = b"moved"
GONE: Final = b"gone"
"""Statuses of a reservation."""

Key = tuple[int, int]
"""Router and request sequence."""


@dataclass(slots=True)
class Entry:
    """One reservation."""

    slot: int
    generation: int
    tokens: int
    prefill: bool = True


class SharedBooks:
    """One fleet's counters, ledgers and siblings.

    Attributes:
        slots: dtype COUNTERS_RECORD, as routers read it.
        contexts: mean context of what is queued on each slot; likewise.
        entries: reservations that have not been released.
        classes: of booked requests.
    """

    def __init__(self, slots_count: int) -> None:
        self.slots = np.zeros(slots_count, COUNTERS_RECORD)
        self.contexts = np.zeros(slots_count, CONTEXT)
        self.entries: dict[Key, Entry] = {}
        self.classes = SharedClasses()
        self._siblings: dict[bytes, dict[int, tuple[int, Key, float]]] = {}

    def open(self, slot: int) -> None:
        """A new instance takes the slot; its lease does not end."""
        generation = int(self.slots["generation"][slot])
        self.slots[slot] = np.zeros((), COUNTERS_RECORD)
        self.slots["generation"][slot] = generation + 1
        self.slots["flags"][slot] = int(SlotFlag.USED)
        self.slots["lease_until_s"][slot] = np.inf

    def report(
        self,
        slot: int,
        *,
        running_count: int,
        waiting_count: int,
        kv_usage_ratio: float,
        now_s: float,
    ) -> None:
        """An engine's counters arrive; what routers have not reserved is foreign."""
        record = self.slots[slot]
        busy = running_count + waiting_count
        record["running_count"], record["waiting_count"] = running_count, waiting_count
        record["kv_usage_millionths"] = round(kv_usage_ratio * 1_000_000)
        record["foreign_requests"] = max(0, busy - int(record["reserved_requests_peak"]))
        record["reserved_requests_peak"] = record["reserved_requests"]
        record["published_s"] = now_s

    def read(
        self, now_s: float, milestones: bytes = b""
    ) -> tuple[FleetCounters, npt.NDArray[np.void]]:
        """The counters of this moment, and who is about to compute prefixes of a chain."""
        counters = FleetCounters(
            now_s=now_s,
            membership=1,
            epoch=1,
            slots=self.slots.copy(),
            contexts=self.contexts.copy(),
        )
        found = self._found(milestones, now_s)
        rows = [(slot, int(self.slots["generation"][slot]), d) for slot, d in found.items()]
        return counters, np.array(rows, SIBLING)

    def reserve(
        self,
        key: Key,
        candidates: npt.NDArray[np.void],
        in_flight: InFlight | None,
        *,
        now_s: float,
        choice: int = -1,
        expected_batch_size: int = -1,
        classes: ClassReport | None = None,
        prompt_tokens: int = 0,
    ) -> tuple[bytes, int, bytes]:
        """Book the request on one candidate, by the counters of this moment.

        Args:
            key: of the request.
            candidates: dtype CANDIDATE, equals in order of preference.
            in_flight: for counting siblings; None: they are not.
            now_s: this moment.
            choice: the only acceptable candidate; -1 takes the least product.
            expected_batch_size: the choice's batch size when it was made; -1 for any.
            classes: to be counted and noted; None: the request is not.
            prompt_tokens: of the request, for what its new ones attend to; 0: that is not told.

        Returns:
            OK, MOVED (nothing is booked: score again) or GONE; the place among the candidates, -1
            when it is not open; and the states of all, packed as CANDIDATE_STATE.
        """
        assert key not in self.entries, key
        found = self._found(in_flight.milestones.packed, now_s) if in_flight else {}
        states = np.zeros(len(candidates), CANDIDATE_STATE)
        best: tuple[int, int, int] | None = None
        place, moved = -1, False
        expected = None if in_flight is None else in_flight.expected_tokens
        rows = zip(candidates.tolist(), *self._candidate_columns(candidates, now_s), strict=True)
        for i, ((slot, _, new), queued, batch, is_open) in enumerate(rows):
            after = new
            if is_open and in_flight is not None and slot in found:
                after = _new_after(found[slot], new, in_flight, i)
            moved = moved or (is_open and expected is not None and int(expected[i]) != after)
            states[i] = (queued, batch, after)
            weight = ((queued + after) * (batch + 1), after, batch)
            if is_open and choice in {-1, i} and (best is None or weight < best):
                best, place = weight, i
        if best is None:
            return GONE, -1, states.tobytes()
        if expected_batch_size >= 0 and (moved or best[2] != expected_batch_size):
            return MOVED, place, states.tobytes()
        slot, generation, _ = candidates[place].tolist()
        self._book_context(slot, best[1], context_tokens(prompt_tokens, best[1]))
        self._book(key, slot, generation, best[1], in_flight=in_flight, now_s=now_s)
        if classes is not None:
            self.classes.count(classes.prefixes, now_s)
            if classes.verdict is not None:
                lower = classes.holder_flags[place] == 1
                self.classes.judge(classes.verdict, now_s, lower=lower)
        return OK, place, states.tobytes()

    def prefilled(self, key: Key) -> None:
        """The request's prefill has ended."""
        entry = self.entries.get(key)
        if entry is not None and entry.prefill:
            self.slots["reserved_prefill_tokens"][entry.slot] -= entry.tokens
            entry.prefill = False

    def release(self, key: Key) -> None:
        """The request has ended."""
        self.prefilled(key)
        entry = self.entries.pop(key)
        self.slots["reserved_requests"][entry.slot] -= 1

    def _book(
        self,
        key: Key,
        slot: int,
        generation: int,
        tokens: int,
        *,
        in_flight: InFlight | None,
        now_s: float,
    ) -> None:
        self.entries[key] = Entry(slot, generation, tokens)
        record = self.slots[slot]
        record["reserved_requests"] += 1
        record["reserved_prefill_tokens"] += tokens
        record["reserved_requests_peak"] = max(
            record["reserved_requests_peak"], record["reserved_requests"]
        )
        if in_flight is None or tokens < in_flight.milestones.new_tokens_min:
            return
        hit = in_flight.milestones.prompt_tokens - tokens
        for depth, name in _milestones(in_flight.milestones.packed):
            if depth > hit:
                named = self._siblings.setdefault(name, {})
                if len(named) < SIBLINGS_PER_PREFIX_MAX or slot in named:
                    named[slot] = (generation, key, now_s + SIBLING_TTL_S)

    def _book_context(self, slot: int, tokens: int, context: int) -> None:
        """Tokens of a context of their own join those queued; what leaves is taken for average."""
        queued, mean = int(self.slots["reserved_prefill_tokens"][slot]), int(self.contexts[slot])
        if tokens == 0 or context == 0:
            return
        if queued > 0 and mean > 0:
            context = math.floor((queued * mean + tokens * context) / (queued + tokens) + 0.5)
        self.contexts[slot] = context

    def _candidate_columns(
        self, candidates: npt.NDArray[np.void], now_s: float
    ) -> tuple[list[int], list[int], list[bool]]:
        """Queued prefill tokens, batch size, and whether it is open, of each candidate.

        By columns: one field of one record at a time takes numpy twenty times as long.
        """
        slots, place = self.slots, candidates["slot"]
        batch = slots["reserved_requests"].astype(np.int64) + slots["foreign_requests"]
        is_open = (slots["flags"] == _USED) & (slots["lease_until_s"] >= now_s)
        is_same = slots["generation"][place] == candidates["generation"]
        return (
            slots["reserved_prefill_tokens"][place].tolist(),
            batch[place].tolist(),
            (is_open[place] & is_same).tolist(),
        )

    def _found(self, packed: bytes, now_s: float) -> dict[int, int]:
        """The deepest milestone, in tokens, at which each slot has a living sibling."""
        found: dict[int, int] = {}
        for depth, name in reversed(_milestones(packed)):
            named = self._siblings.get(name)
            if named is None or (len(found) > SIBLINGS_MANY and len(named) == len(found)):
                continue
            for slot, (generation, key, until_s) in list(named.items()):
                if slot in found:
                    continue
                if until_s >= now_s and self._in_prefill(key, slot, generation):
                    found[slot] = depth
                else:
                    del named[slot]
            if not named:
                del self._siblings[name]
        return found

    def _in_prefill(self, key: Key, slot: int, generation: int) -> bool:
        entry = self.entries.get(key)
        return (
            entry is not None
            and entry.prefill
            and (entry.slot, entry.generation) == (slot, generation)
            and int(self.slots["generation"][slot]) == generation
        )


def _milestones(packed: bytes) -> list[tuple[int, bytes]]:
    return [
        (int.from_bytes(packed[i : i + 4], "little"), packed[i + 4 : i + _MILESTONE])
        for i in range(0, len(packed), _MILESTONE)
    ]


def _new_after(depth_tokens: int, new: int, in_flight: InFlight, place: int) -> int:
    prompt_tokens = in_flight.milestones.prompt_tokens
    block = int(in_flight.block_size_tokens[place])
    reusable = min(depth_tokens, prompt_tokens - 1)
    return min(new, prompt_tokens - (reusable - reusable % block))
