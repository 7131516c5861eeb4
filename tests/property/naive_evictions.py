"""Eviction policies as their laws say them: a list of free blocks, searched whole every time."""
# ruff: noqa: ARG002  # a policy is told of what it does not look at, too

from collections.abc import Sequence
from math import exp, inf

from workers.simulated.eviction.base import Category
from workers.simulated.eviction.reuse import COUNT_MIN, GAP_S_MIN
from workers.simulated.eviction.workload_aware import FADE_S, LIFE_S, REMEMBERED_PER_BLOCK

Key = tuple[float, float]


class Naive:
    """Least recently used; others say another `key`: the lowest goes first."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.now_s = 0.0
        self.empty = list(range(capacity_blocks))  # the next to go first
        self.resident: list[int] = []  # free, the first freed first
        self.content: dict[int, int] = {}
        self.uses: dict[int, int] = {}

    def advance(self, now_s: float) -> None:
        """It is this late."""
        self.now_s = now_s

    def begin(self, request_id: str) -> None:
        """A request begins."""

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """Hits."""
        for block_id in block_ids:
            self.uses[block_id] += 1

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """New contents."""
        for block_id, content in zip(block_ids, contents, strict=True):
            self.content[block_id] = content
            self.uses[block_id] = 1

    def release(self, block_ids: Sequence[int]) -> None:
        """To the end."""
        self.resident += block_ids

    def release_empty(self, block_id: int) -> None:
        """To the front."""
        self.empty.insert(0, block_id)

    def revive(self, block_ids: Sequence[int]) -> None:
        """Free no more."""
        for block_id in block_ids:
            self.resident.remove(block_id)

    def take(self, count: int) -> list[int]:
        """One by one."""
        return [self.empty.pop(0) if self.empty else self.evict() for _ in range(count)]

    def evict(self) -> int:
        """The lowest key; of equals the first freed."""
        block_id = min(self.resident, key=self.key)
        self.resident.remove(block_id)
        self.evicted(block_id)
        return block_id

    def key(self, block_id: int) -> float:
        """Equal for all: the first freed goes."""
        return 0.0

    def evicted(self, block_id: int) -> None:
        """For policies that remember."""


class NaiveFifo(Naive):
    """By first release since the content came."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.first_freed: list[int] = []

    def release(self, block_ids: Sequence[int]) -> None:
        """Whoever was free before keeps its place."""
        super().release(block_ids)
        self.first_freed += [one for one in block_ids if one not in self.first_freed]

    def key(self, block_id: int) -> float:
        """Place in that order."""
        return self.first_freed.index(block_id)

    def evicted(self, block_id: int) -> None:
        """Its content is gone."""
        self.first_freed.remove(block_id)


class NaiveLfu(Naive):
    """By uses."""

    def key(self, block_id: int) -> float:
        """Hits and the storing."""
        return self.uses[block_id]


class NaiveGdfs(Naive):
    """By uses plus the value of what had gone at the last use."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.gone = [0]
        self.gone_at_use: dict[int, int] = {}

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """Used now."""
        super().touch(block_ids, category)
        self.gone_at_use.update(dict.fromkeys(block_ids, max(self.gone)))

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """Used now."""
        super().store(block_ids, contents, category)
        self.gone_at_use.update(dict.fromkeys(block_ids, max(self.gone)))

    def key(self, block_id: int) -> int:
        """Its value."""
        return self.gone_at_use[block_id] + self.uses[block_id]

    def evicted(self, block_id: int) -> None:
        """Its value is the clock."""
        self.gone.append(self.key(block_id))


class NaiveS3Fifo(Naive):
    """Two lists that hold blocks in use, too, which are passed over."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.small: list[int] = []
        self.main: list[int] = []
        self.gone: list[int] = []  # contents, the latest last
        self.known: set[int] = set()  # blocks whose content was remembered

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """Hits count from here."""
        for block_id, content in zip(block_ids, contents, strict=True):
            self.content[block_id], self.uses[block_id] = content, 0
            self.known.discard(block_id)
            if content in self.gone:
                self.gone.remove(content)
                self.known.add(block_id)

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """At most three count."""
        for block_id in block_ids:
            self.uses[block_id] = min(3, self.uses[block_id] + 1)

    def release(self, block_ids: Sequence[int]) -> None:
        """Whoever was free before keeps its place."""
        super().release(block_ids)
        for block_id in block_ids:
            if block_id not in self.small + self.main:
                (self.main if block_id in self.known else self.small).append(block_id)

    def evict(self) -> int:
        """Algorithm 1 of the paper, on what is free."""
        while True:
            small = [one for one in self.small if one in self.resident]
            main = [one for one in self.main if one in self.resident]
            if small and (len(small) > self.capacity_blocks / 10 or not main):
                block_id = small[0]
                self.small.remove(block_id)
                goes = self.uses[block_id] <= 1
                self.uses[block_id] = 0
                if goes:
                    content = self.content[block_id]
                    self.gone = [one for one in self.gone if one != content] + [content]
                    self.gone = self.gone[-(self.capacity_blocks - self.capacity_blocks // 10) :]
            else:
                block_id = main[0]
                self.main.remove(block_id)
                goes = self.uses[block_id] == 0
                self.uses[block_id] -= 1
            if goes:
                self.resident.remove(block_id)
                return block_id
            self.main.append(block_id)


class NaiveBelady(Naive):
    """Looks through all that is to come."""

    def __init__(self, capacity_blocks: int, requests: Sequence[tuple[str, Sequence[int]]]) -> None:
        super().__init__(capacity_blocks)
        self.coming = dict(enumerate(requests))

    def begin(self, request_id: str) -> None:
        """It comes no more."""
        self.coming = {at: one for at, one in self.coming.items() if one[0] != request_id}

    def key(self, block_id: int) -> float:
        """The latest first."""
        wanted = self.content[block_id]
        return -min((at for at, (_, asks) in self.coming.items() if wanted in asks), default=inf)


class NaiveWorkloadAware(Naive):
    """Adds the whole past up for every block."""

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.category: dict[int, Category | None] = {}
        self.freed_s: dict[int, float] = {}
        self.seen: list[tuple[Category | None, int, float]] = []  # blocks, when
        self.reused: list[tuple[Category | None, float, float]] = []  # gap, when
        self.gone: dict[int, tuple[Category | None, float]] = {}  # content -> whose, freed when

    def advance(self, now_s: float) -> None:
        """What has faded to next to nothing is no more."""
        super().advance(now_s)
        for own in {last for last, _, _ in self.reused}:
            reuses = [(gap_s, self.faded(at_s)) for last, gap_s, at_s in self.reused if last == own]
            if sum(weight for gap_s, weight in reuses if gap_s >= GAP_S_MIN) < COUNT_MIN:
                self.reused = [
                    (last, 0.0 if last == own else gap_s, at_s) for last, gap_s, at_s in self.reused
                ]
            if sum(weight for _, weight in reuses) < COUNT_MIN:
                self.reused = [one for one in self.reused if one[0] != own]

    def touch(self, block_ids: Sequence[int], category: Category | None) -> None:
        """Credited to whoever used a block last."""
        for block_id in block_ids:
            gap_s = self.now_s - self.freed_s[block_id] if block_id in self.resident else 0.0
            self.reused.append((self.category[block_id], gap_s, self.now_s))
            self.category[block_id] = category
        self.seen.append((category, len(block_ids), self.now_s))

    def store(
        self, block_ids: Sequence[int], contents: Sequence[int], category: Category | None
    ) -> None:
        """What had gone is missed by whoever used it last."""
        for block_id, content in zip(block_ids, contents, strict=True):
            self.content[block_id], self.category[block_id] = content, category
            if content in self.gone:
                last, freed_s = self.gone.pop(content)
                self.reused.append((last, self.now_s - freed_s, self.now_s))
        self.seen.append((category, len(block_ids), self.now_s))

    def release(self, block_ids: Sequence[int]) -> None:
        """Free from now on."""
        super().release(block_ids)
        self.freed_s.update(dict.fromkeys(block_ids, self.now_s))

    def evicted(self, block_id: int) -> None:
        """Remembered for a while, if its return would tell anything."""
        if self.category[block_id] is None:
            return
        content = self.content[block_id]
        self.gone.pop(content, None)
        self.gone[content] = (self.category[block_id], self.freed_s[block_id])
        while len(self.gone) > REMEMBERED_PER_BLOCK * self.capacity_blocks:
            del self.gone[next(iter(self.gone))]

    def key(self, block_id: int) -> float:
        """The formula of section 5."""
        own = self.category[block_id]
        reuses = [(gap_s, self.faded(at_s)) for last, gap_s, at_s in self.reused if last == own]
        if own is None or not reuses:
            return 0.0
        seen = sum(count * self.faded(at_s) for one, count, at_s in self.seen if one == own)
        long = [(gap_s, weight) for gap_s, weight in reuses if gap_s >= GAP_S_MIN]
        mean_s = GAP_S_MIN
        rate = 1 / mean_s
        if long:
            rate = sum(weight for _, weight in long) / sum(gap * weight for gap, weight in long)
        ratio = min(1.0, sum(weight for _, weight in reuses) / seen) if seen else 1.0
        age_s = self.now_s - self.freed_s[block_id]
        return ratio * exp(-rate * age_s) * (1 - exp(-rate * LIFE_S))

    def faded(self, at_s: float) -> float:
        """What that time's observations still count."""
        periods = int(self.now_s // FADE_S) - int(at_s // FADE_S)
        return float(0.5**periods)
