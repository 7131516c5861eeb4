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


@dataclass
class ReferenceFleet:
    """Slots and ledgers; one ledger per registered router."""

    slots: dict[int, Slot] = field(default_factory=dict)
    ledgers: dict[str, dict[int, Reservation | None]] = field(default_factory=dict)

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

    def reserve(
        self, router: str, sequence: int, candidates: list[tuple[int, int, int]]
    ) -> tuple[str, int]:
        """The least product among the open candidates."""
        ledger = self.ledgers.get(router)
        if ledger is None:
            return "lost", -1
        if sequence in ledger and ledger[sequence] is None:
            return "late", -1
        booked = ledger.get(sequence)
        for i, (slot, _, _) in enumerate(candidates):
            if booked is not None and booked.slot == slot:
                return "ok", i
        scored = [
            ((s.tokens + new) * (s.requests + 1), new, s.requests, i)
            for i, (slot, generation, new) in enumerate(candidates)
            if (s := self.slots[slot]).used and s.generation == generation
        ]
        if not scored:
            return "gone", -1
        *_, index = min(scored)
        ledger[sequence] = Reservation(*candidates[index])
        self._book(ledger[sequence], 1)
        return "ok", index

    def prefilled(self, router: str, sequence: int) -> None:
        """Its tokens are no longer queued."""
        r = self.ledgers.get(router, {}).get(sequence)
        if r is not None and r.prefill:
            slot = self.slots[r.slot]
            if self.holds(r):
                slot.tokens = max(0, slot.tokens - r.tokens)
            r.prefill = False

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
