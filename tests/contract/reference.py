"""Python twins of the Redis functions: plain, slow, obviously right."""

from dataclasses import dataclass, field


@dataclass
class ReferenceIndex:
    """Holders per block hash; the lookup walks block by block."""

    holders: dict[bytes, set[int]] = field(default_factory=dict)

    def store(self, slot: int, hashes: list[bytes]) -> None:
        """The slot holds these blocks."""
        for block_hash in hashes:
            self.holders.setdefault(block_hash, set()).add(slot)

    def remove(self, slot: int, hashes: list[bytes]) -> None:
        """The slot holds these blocks no more."""
        for block_hash in hashes:
            self.holders.get(block_hash, set()).discard(slot)

    def depths(self, hashes: list[bytes], slots: int) -> list[int]:
        """Leading blocks held by each slot."""
        depths = [0] * slots
        for slot in range(slots):
            while depths[slot] < len(hashes) and slot in self.holders.get(
                hashes[depths[slot]], set()
            ):
                depths[slot] += 1
        return depths


@dataclass
class Slot:
    """Counters of one slot."""

    generation: int = 0
    used: bool = False
    requests: int = 0
    tokens: int = 0


@dataclass
class Reservation:
    """One booked request."""

    slot: int
    generation: int
    tokens: int
    prefill: bool = True
    awaited: bytes | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt that may have siblings.

    Attributes:
        tokens: its length.
        milestones: depth in tokens -> hash of that prefix.
        new_tokens_min: a request that computes fewer tells nobody.
    """

    tokens: int
    milestones: dict[int, bytes]
    new_tokens_min: int


@dataclass
class ReferenceFleet:
    """Slots and ledgers; one ledger per registered router.

    Attributes:
        siblings: (prefix, slot) -> router and sequence of who said last that it computes it there.
    """

    slots: dict[int, Slot] = field(default_factory=dict)
    ledgers: dict[str, dict[int, Reservation | None]] = field(default_factory=dict)
    siblings: dict[tuple[bytes, int], tuple[str, int, int]] = field(default_factory=dict)

    def join(self) -> tuple[int, int]:
        """The lowest free slot, one generation on."""
        slot = next(i for i in range(256) if not self.slots.setdefault(i, Slot()).used)
        self.slots[slot] = Slot(self.slots[slot].generation + 1, used=True)
        return slot, self.slots[slot].generation

    def leave(self, slot: int) -> None:
        """Close, sweep and free in one."""
        self.slots[slot] = Slot(self.slots[slot].generation)

    def holds(self, r: Reservation) -> bool:
        """Whether the slot still is what the request was reserved on."""
        return self.slots[r.slot].used and self.slots[r.slot].generation == r.generation

    def _book(self, r: Reservation, sign: int) -> None:
        slot = self.slots[r.slot]
        if self.holds(r):
            slot.requests = max(0, slot.requests + sign)
            slot.tokens = max(0, slot.tokens + sign * r.tokens * r.prefill)

    def in_flight(self, slot: int, prompt: Prompt) -> int:
        """Deepest milestone that a request in prefill on the slot is about to compute."""
        depth = 0
        for tokens, prefix in prompt.milestones.items():
            router, sequence, generation = self.siblings.get((prefix, slot), ("", 0, 0))
            r = self.ledgers.get(router, {}).get(sequence)
            if r is not None and r.prefill and (r.slot, r.generation) == (slot, generation):
                depth = max(depth, tokens * self.holds(r))
        return depth

    def new_tokens(self, slot: int, new: int, prompt: Prompt | None, block: int) -> int:
        """What is left to compute after those in flight; hits are whole blocks of the engine."""
        if prompt is None:
            return new
        reusable = min(self.in_flight(slot, prompt), prompt.tokens - 1)
        return min(new, prompt.tokens - reusable // block * block)

    def reserve(
        self,
        router: str,
        sequence: int,
        candidates: list[tuple[int, int, int]],
        prompt: Prompt | None = None,
        blocks: list[int] | None = None,
        *,
        slowness: list[int] | None = None,
    ) -> tuple[str, int]:
        """The least product among the open candidates; blocks, slowness: of each one's engine."""
        ledger = self.ledgers.get(router)
        if ledger is None:
            return "lost", -1
        if sequence in ledger and ledger[sequence] is None:
            return "late", -1
        booked = ledger.get(sequence)
        for i, (slot, _, _) in enumerate(candidates):
            if booked is not None and booked.slot == slot:
                return "ok", i
        scored = []
        for i, (slot, generation, by_index) in enumerate(candidates):
            s = self.slots[slot]
            if s.used and s.generation == generation:
                new = self.new_tokens(slot, by_index, prompt, blocks[i] if blocks else 1)
                slow = slowness[i] if slowness else 1
                scored.append(((s.tokens + new) * slow * (s.requests + 1), new, s.requests, i))
        if not scored:
            return "gone", -1
        _, new, _, index = min(scored)
        slot, generation, _ = candidates[index]
        ledger[sequence] = Reservation(slot, generation, new)
        self._book(ledger[sequence], 1)
        if prompt is not None and new >= prompt.new_tokens_min:
            for tokens, prefix in prompt.milestones.items():
                if tokens > prompt.tokens - new:
                    self.siblings[prefix, slot] = (router, sequence, generation)
        return "ok", index

    def prefilled(self, router: str, sequence: int) -> None:
        """Its tokens are no longer queued."""
        r = self.ledgers.get(router, {}).get(sequence)
        if r is not None and r.prefill:
            slot = self.slots[r.slot]
            if self.holds(r):
                slot.tokens = max(0, slot.tokens - r.tokens)
            r.prefill, r.awaited = False, None

    def await_(self, router: str, sequence: int, block: bytes) -> bool:
        """Its prefill ends when its instance has stored this block; whether that was noted."""
        r = self.ledgers.get(router, {}).get(sequence)
        if r is None or not r.prefill or not self.holds(r):
            return False
        r.awaited = block
        return True

    def awaited(self, slot: int) -> set[bytes]:
        """Blocks awaited on a slot that is used."""
        booked = [r for ledger in self.ledgers.values() for r in ledger.values() if r is not None]
        return {r.awaited for r in booked if r.awaited and r.slot == slot and self.holds(r)}

    def stored(self, slot: int, blocks: set[bytes]) -> int:
        """The instance has stored these blocks: how many prefills ended."""
        ended = 0
        for router, ledger in self.ledgers.items():
            for sequence, r in ledger.items():
                if r is not None and r.slot == slot and self.holds(r) and r.awaited in blocks:
                    self.prefilled(router, sequence)
                    ended += 1
        return ended

    def release(self, router: str, sequence: int) -> None:
        """It has ended; a mark stays where it was never booked."""
        ledger = self.ledgers.get(router)
        if ledger is None:
            return
        r = ledger.get(sequence)
        if r is not None:
            del ledger[sequence]
            self._book(r, -1)
        else:
            ledger[sequence] = None

    def reap(self, router: str) -> None:
        """Everything it has booked is taken back."""
        for r in self.ledgers.pop(router, {}).values():
            if r is not None:
                self._book(r, -1)
