"""The requests of a batch that decode: one token each in every step. Pure.

All of them advance together, so a step changes nothing about them but one number, the engine's
count of steps. A request's tokens are `token_offset + steps`; which request needs a block, or fills
one, in which step follows from the remainder of its offset by the block size.
"""

from bisect import insort
from collections.abc import Iterator

from workers.simulated.fast.request import ActiveChain

Turn = tuple[int, bool, ActiveChain]
"""A step's offset from the first asked for; True: fills a block, False: needs one; who."""


class Decoders:
    """Decoding requests in the order of their admission.

    Attributes:
        steps: steps of the engine that have ended.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self.steps = 0
        self._block_size = block_size_tokens
        self._members: dict[int, ActiveChain] = {}  # by rank; who joins is the youngest
        self._phases: list[dict[int, ActiveChain]] = [{} for _ in range(block_size_tokens)]
        self._needed = [0] * block_size_tokens  # by step, modulo: how many then need a block
        self._ends: list[tuple[int, int]] = []  # (steps at its end, rank), the next first
        self._offsets_sum = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ActiveChain]:
        return iter(self._members.values())

    def __contains__(self, active: ActiveChain) -> bool:
        return active.rank in self._members

    @property
    def context_tokens(self) -> int:
        """Sum of their lengths in the coming step; it grows by one each per step."""
        return self._offsets_sum + self.steps * len(self._members)

    @property
    def steps_to_end(self) -> int:
        """Steps until the first of them has its last token. There must be one."""
        return self._ends[0][0] - self.steps

    def join(self, active: ActiveChain) -> None:
        """A request, younger than all others, has its prompt computed and goes on decoding."""
        active.begin_to_decode()
        offset = active.token_offset = active.token_count - self.steps
        remaining = active.request.output_tokens - active.generated_tokens
        self._members[active.rank] = active
        self._phases[offset % self._block_size][active.rank] = active
        self._needed[(1 - offset) % self._block_size] += 1
        insort(self._ends, (self.steps + remaining, active.rank))
        self._offsets_sum += offset

    def pop_youngest(self) -> ActiveChain:
        """Take out the youngest, to be preempted; its `token_count` is set."""
        rank, active = self._members.popitem()
        request = active.request
        ends = request.prompt_tokens + request.output_tokens - active.token_offset
        self._ends.remove((ends, rank))
        self._leave(active)
        active.token_count = active.token_offset + self.steps
        return active

    def pop_ended(self) -> list[ActiveChain]:
        """Take out those that have their last token, the oldest first."""
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, rank = self._ends.pop(0)
            active = self._members.pop(rank)
            self._leave(active)
            ended.append(active)
        return ended

    def _leave(self, active: ActiveChain) -> None:
        offset = active.token_offset
        del self._phases[offset % self._block_size][active.rank]
        self._needed[(1 - offset) % self._block_size] -= 1
        self._offsets_sum -= offset

    def blocks_needed(self, first: int, last: int) -> int:
        """Blocks they take in the steps with offsets first .. last - 1."""
        cycles, rest = divmod(last - first, self._block_size)
        place = (self.steps + first) % self._block_size
        counts = self._needed[place : place + rest]
        if len(counts) < rest:
            counts += self._needed[: rest - len(counts)]
        return cycles * len(self._members) + sum(counts)

    def steps_within(self, first: int, last: int, free_blocks: int) -> int:
        """How many of the steps with offsets first .. last - 1 the free blocks suffice for."""
        if self.blocks_needed(first, last) <= free_blocks:
            return last - first
        size = self._block_size
        cycles = free_blocks // len(self._members)
        free_blocks -= cycles * len(self._members)
        count = cycles * size
        place = self.steps + first
        while (needed := self._needed[(place + count) % size]) <= free_blocks:
            free_blocks -= needed
            count += 1
        return count

    def turns(self, first: int, last: int) -> Iterator[Turn]:
        """Who needs or fills a block in the steps with offsets first .. last - 1, in order.

        In a step the oldest comes first; who both needs and fills one needs it first.
        """
        size, phases = self._block_size, self._phases
        cycle: list[Turn] = []
        for offset in range(first, min(last, first + size)):
            step = self.steps + offset
            needing, filling = phases[(1 - step) % size], phases[-step % size]
            if needing and filling:
                merged = [(rank, False) for rank in needing] + [(rank, True) for rank in filling]
                members = self._members
                cycle += [(offset, fills, members[rank]) for rank, fills in sorted(merged)]
            elif needing:
                cycle += [(offset, False, active) for active in needing.values()]
            elif filling:
                cycle += [(offset, True, active) for active in filling.values()]
        if last - first <= size:
            yield from cycle
            return
        for base in range(0, last - first, size):
            for offset, fills, active in cycle:
                if base + offset >= last:
                    return
                yield base + offset, fills, active
