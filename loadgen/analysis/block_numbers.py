"""Pure: numbers for blocks, equal for equal prefixes. Vectorised: traces have 10^8 of them."""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]

BLOCKS_MAX = 1 << 25
"""Distinct blocks; each takes 12 bytes here, 24 at most while the table grows, and 16 elsewhere."""

_SLOTS_MIN = 1 << 12
_REMEMBERED_BLOCKS_MAX = 1 << 21  # 20 bytes each
_PLACE_STEP = np.uint64(0x9E3779B97F4A7C15)


def prefix_keys(
    block_ids: npt.NDArray[np.int64], block_size_tokens: int, behind: Keys | None = None
) -> Keys:
    """A key for every block that stands for it and all blocks before it, never 0.

    Sums of hashes of (id, place): equal sequences have equal sums, and others differ but for one
    in 2^64. So no file has to keep the promise that an id stands for a whole prefix.

    Args:
        block_ids: of a prompt's full blocks.
        block_size_tokens: equal ids of other sizes are other blocks.
        behind: keys of the blocks before, for the keys of the rest.
    """
    before = 0 if behind is None else len(behind)
    places = np.arange(before + 1, before + len(block_ids) + 1, dtype=np.uint64) * _PLACE_STEP
    hashed = _mixed(_mixed(block_ids.astype(np.uint64)) ^ (places + np.uint64(block_size_tokens)))
    if before and len(hashed):
        assert behind is not None, "there are blocks before"
        hashed[:1] += behind[-1:]  # of arrays: they may overflow without a warning
    keys: Keys = np.cumsum(hashed, dtype=np.uint64)
    keys[keys == 0] = 1
    return keys


def _mixed(values: Keys) -> Keys:
    """The finaliser of splitmix64: every bit of a value changes half of the result's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Keys = values ^ (values >> np.uint64(31))
    return mixed


class BlockNumbers:
    """Key -> number, in order of first appearance. A hash table of open addresses.

    Attributes:
        count: numbers given so far.
    """

    def __init__(self, *, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._keys: Keys = np.zeros(_SLOTS_MIN, np.uint64)
        self._numbers: Numbers = np.zeros(_SLOTS_MIN, np.int32)
        self.count = 0

    def of(self, keys: Keys) -> Numbers:
        """Numbers of a prompt's blocks; new ones get the next, in order.

        Args:
            keys: of `prefix_keys`, all different.

        Raises:
            ValueError: more than BLOCKS_MAX, and what to do instead.
        """
        numbers = self._found(keys)
        new = np.flatnonzero(numbers < 0)
        if len(new):
            if self.count + len(new) > self._blocks_max:
                raise ValueError(
                    f"more than {self._blocks_max} distinct blocks; analyse a part of the trace "
                    "with --rows_max, --lines_max or --duration_s"
                )
            numbers[new] = np.arange(self.count, self.count + len(new), dtype=np.int32)
            self.count += len(new)
            self._make_room()
            self._insert(keys[new], numbers[new])
        return numbers

    def _found(self, keys: Keys) -> Numbers:
        """-1 for those that are not here."""
        mask = np.uint64(len(self._keys) - 1)
        numbers = np.full(len(keys), -1, np.int32)
        left = np.arange(len(keys))
        slots = keys & mask
        while len(left):
            held = self._keys[slots]
            hit = held == keys[left]
            numbers[left[hit]] = self._numbers[slots[hit]]
            on = ~hit & (held != 0)
            left, slots = left[on], (slots[on] + np.uint64(1)) & mask
        return numbers

    def _insert(self, keys: Keys, numbers: Numbers) -> None:
        mask = np.uint64(len(self._keys) - 1)
        slots = keys & mask
        while len(keys):
            free = self._keys[slots] == 0
            # Of several keys that claim a slot the last one has it; the others see that and go on.
            self._keys[slots[free]] = keys[free]
            placed = self._keys[slots] == keys
            self._numbers[slots[placed]] = numbers[placed]
            on = ~placed
            keys, numbers, slots = keys[on], numbers[on], (slots[on] + np.uint64(1)) & mask

    def _make_room(self) -> None:
        """At most half of the slots are taken."""
        size = len(self._keys)
        while 2 * self.count > size:
            size *= 2
        if size == len(self._keys):
            return
        taken = self._keys != 0
        keys, numbers = self._keys[taken], self._numbers[taken]
        self._keys = np.zeros(size, np.uint64)
        self._numbers = np.zeros(size, np.int32)
        self._insert(keys, numbers)


class PromptNumbers:
    """Numbers of whole prompts.

    Most begin with an earlier one of their session: that is looked at first, and only the rest is
    hashed and looked up.

    Attributes:
        count: distinct blocks so far.
    """

    def __init__(self) -> None:
        self._blocks = BlockNumbers()
        self._last: OrderedDict[int, tuple[npt.NDArray[np.int64], Keys, Numbers, int]]
        self._last = OrderedDict()
        self._remembered_blocks = 0

    @property
    def count(self) -> int:
        """Distinct blocks so far."""
        return self._blocks.count

    def of(self, block_ids: npt.NDArray[np.int64], block_size_tokens: int, session: int) -> Numbers:
        """Numbers of a prompt's full blocks.

        Args:
            block_ids: the trace's.
            block_size_tokens: of these blocks.
            session: prompts of equal ones are likely to begin alike.

        Raises:
            ValueError: as `BlockNumbers.of`.
        """
        last = self._last.pop(session, None)
        known = 0
        if last is not None:
            self._remembered_blocks -= len(last[0])
            known = _alike(last[0], block_ids) if last[3] == block_size_tokens else 0
        if last is None or not known:
            keys = prefix_keys(block_ids, block_size_tokens)
            numbers = self._blocks.of(keys)
        else:
            rest = prefix_keys(block_ids[known:], block_size_tokens, last[1][:known])
            keys = np.concatenate((last[1][:known], rest))
            numbers = np.concatenate((last[2][:known], self._blocks.of(rest)))
        self._last[session] = (block_ids, keys, numbers, block_size_tokens)
        self._remembered_blocks += len(block_ids)
        while self._remembered_blocks > _REMEMBERED_BLOCKS_MAX and len(self._last) > 1:
            _, forgotten = self._last.popitem(last=False)
            self._remembered_blocks -= len(forgotten[0])
        return numbers


def _alike(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """Leading elements that are equal."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
