"""Which awaited prefills have ended: by stored blocks, else by the engine's own counts; pure."""

from collections.abc import Sequence
from typing import Final

from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import AWAITED_PER_HEARTBEAT_MAX
from indexer.engine.engine_metrics import EngineSample, RequestTotals
from indexer.table.block_table import BlockTable

ON_ITS_WAY_S: Final = 0.5
"""So long after it was heard of, a request has surely reached its engine."""


class FirstTokens:
    """How many first tokens an engine has given, and how many it owes to those it has now.

    It tells how many requests had a first token and how many ended. The difference is those that
    have their first token and go on, but for a skew: requests aborted before their first token,
    where aborts count as ended, or after it, where they do not (vLLM 0.32). The skew is kept
    between what all and what none of the running requests having their first token would mean: so
    an engine that runs nothing shows it, and on one that never idles an abort is made up for when
    all that run have theirs. It begins as of an engine that has aborted nothing, as far as what is
    shown at first allows that. Preempted requests may leave it too high: then more first tokens
    seem owed than are, and what is awaited ends late.

    Attributes:
        given_count: since the engine's start.
        owed_count: to requests without one; from its waiting ones to all of its requests.
    """

    def __init__(self) -> None:
        self.given_count = 0
        self.owed_count = 0
        self._skew = 0

    def look(self, totals: RequestTotals, running_count: int, waiting_count: int) -> None:
        """What the engine shows now."""
        ahead = totals.first_tokens_count - totals.ended_count
        least = ahead - min(running_count, totals.first_tokens_count)
        self._skew = min(max(self._skew, least), ahead)
        self.given_count = totals.first_tokens_count
        self.owed_count = running_count + waiting_count - (ahead - self._skew)


class Awaited:
    """What the last heartbeat's answer named, at most AWAITED_PER_HEARTBEAT_MAX.

    A block that is stored tells exactly, on whatever slot it was awaited, because a hash names the
    whole prefix. A ticket is never stored, and neither is a block that the router got wrong (an
    image in the prompt, another tokenizer than the engine's) or whose event was lost; so all of
    them also end by counting: an engine serves in the order of arrival, hence a request has its
    first token once there were as many as were given and owed at a moment when it was there. That
    comes later than its block, because who came behind it by then is counted too, and is too early
    only where the engine lets others overtake (scheduling by priority).

    A request is there ON_ITS_WAY_S after it was heard of, but an engine shows its load only as it
    was at the end of its last step: so what routers have reserved beyond it is owed as well. Every
    look gives such a number, and the least of them is as good as any.
    """

    def __init__(self) -> None:
        self._heard_s: dict[BlockHash, float] = {}
        self._due: dict[BlockHash, int] = {}  # first tokens given, by when its own is among them
        self._first_tokens: FirstTokens | None = None  # None: the engine does not count them
        self._engine_count = 0
        self._looked_s = float("-inf")

    def look(self, sample: EngineSample | None, begun_s: float) -> None:
        """What the engine shows.

        Args:
            sample: None when it tells nothing for this rank.
            begun_s: monotonic clock before it was asked.
        """
        if sample is None or sample.totals is None:
            self._first_tokens = None
            return
        before = self._first_tokens
        if before is None or sample.totals.first_tokens_count < before.given_count:
            self._first_tokens = FirstTokens()  # it has started anew
            self._due.clear()
        assert self._first_tokens is not None
        counters = sample.counters
        self._first_tokens.look(sample.totals, counters.running_count, counters.waiting_count)
        self._engine_count = counters.running_count + counters.waiting_count
        self._looked_s = begun_s

    def hear(self, blocks: Sequence[BlockHash], reserved_count: int, now_s: float) -> None:
        """What is awaited from now on.

        Args:
            blocks: hashes of blocks, and tickets.
            reserved_count: requests that routers have on the slot.
            now_s: monotonic clock.
        """
        kept = blocks[:AWAITED_PER_HEARTBEAT_MAX]
        self._heard_s = {block: self._heard_s.get(block, now_s) for block in kept}
        self._due = {block: due for block, due in self._due.items() if block in self._heard_s}
        first_tokens = self._first_tokens
        if first_tokens is None:
            return
        unseen_count = max(0, reserved_count - self._engine_count)
        due = first_tokens.given_count + first_tokens.owed_count + unseen_count
        for block, heard_s in self._heard_s.items():
            if self._looked_s >= heard_s + ON_ITS_WAY_S:
                self._due[block] = min(self._due.get(block, due), due)

    def ended(self, table: BlockTable) -> list[BlockHash]:
        """Those of them whose prefills have ended."""
        blocks = list(self._heard_s)
        stored = set(table.stored(blocks)) if blocks else set()
        return [block for block in blocks if block in stored or self._is_counted(block)]

    def _is_counted(self, block: BlockHash) -> bool:
        due, first_tokens = self._due.get(block), self._first_tokens
        return due is not None and first_tokens is not None and first_tokens.given_count >= due
