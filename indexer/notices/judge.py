"""Holds the index against what engines report: judges the notices for one rank, and acts."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from indexer.contract.identifiers import BlockHash
from indexer.contract.records import HeartbeatReply
from indexer.notices.judgement import Finding, Report, Suspicion, finding, read
from indexer.notices.recollection import Marks, RemoteClock
from indexer.publishing.publisher import Publisher
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.telemetry import Telemetry

CREDITED: Final = "credited"
"""The engine had more than the index knew of, and that is published now."""

LATE: Final = "late"
"""The decision is older than what is remembered: nobody can tell."""

MALFORMED: Final = "malformed"


class Judge:
    """Judges the notices for one rank.

    Redis tells the time of a decision; ours is estimated from the answers to heartbeats, and every
    doubt about it makes a change count as later than the decision.
    """

    def __init__(
        self,
        publisher: Publisher,
        telemetry: Telemetry,
        *,
        rank: str,
        block_size_tokens: int,
        engine_block_size_tokens: int,
    ) -> None:
        self._publisher = publisher
        self._telemetry = telemetry
        self._rank = rank
        self._block_size_tokens = block_size_tokens
        self._engine_block_size_tokens = engine_block_size_tokens
        self._table: BlockTable | None = None
        self._about: tuple[int, int] | None = None
        self._clock = RemoteClock()
        self._marks = Marks()
        self._suspicion = Suspicion()
        self._log = structlog.get_logger().bind(rank=rank)

    def note(self, sent_s: float, reply: HeartbeatReply, table: BlockTable) -> None:
        """A heartbeat was answered.

        Args:
            sent_s: when it was sent, monotonic.
            reply: the answer.
            table: as it is now; its notices are judged by this one.
        """
        now_s = time.monotonic()
        member = self._publisher.membership
        if self._about != (member.slot, member.generation):
            self._about = (member.slot, member.generation)
            self._clock.clear()  # another server may answer now
        if self._table is not table:
            self._table = table
            self._marks.clear()
        self._clock.observe(sent_s, now_s, reply.now_s)
        self._marks.note(now_s, table.mark)

    def judge(self, notices: Sequence[bytes], table: BlockTable) -> tuple[list[Delta], bool]:
        """What has to be published, and whether to start over."""
        change_log = self._publisher.change_log
        changed_s, is_on_its_way = change_log.latest(), self._publisher.on_their_way()
        counts: Counter[str] = Counter()
        deltas, starts_over = [], False
        for raw in notices:
            try:
                report = read(
                    raw,
                    block_size_tokens=self._block_size_tokens,
                    engine_block_size_tokens=self._engine_block_size_tokens,
                )
            except ValueError as error:
                counts[MALFORMED] += 1
                self._log.warning("notice_malformed", error=str(error))
                continue
            decided_s = self._clock.earliest_local_s(report.decided_s)
            if not change_log.reaches(decided_s):
                counts[LATE] += 1
                continue
            has_changed = partial(_has_changed, changed_s, is_on_its_way, decided_s)
            delta, kind, is_suspicious = self._act(report, decided_s, has_changed, table)
            counts[kind] += 1
            deltas.append(delta)
            starts_over |= is_suspicious
        for kind, count in counts.items():
            self._telemetry.notices.labels(self._rank, kind).inc(count)
        say = self._log.warning if counts[Finding.OVER] else self._log.info
        say("notices_judged", **counts)
        return deltas, starts_over

    def _act(
        self,
        report: Report,
        decided_s: float,
        has_changed: Callable[[BlockHash], bool],
        table: BlockTable,
    ) -> tuple[Delta, str, bool]:
        """What to publish, how to count it, whether it is the one too many."""
        match finding(report, has_changed=has_changed, is_published=table.holds):
            case Finding.OVER:
                return Delta(), Finding.OVER, self._suspicion.note_over(time.monotonic())
            case Finding.UNDER:
                since = self._marks.at(decided_s)
                if since is None:
                    return Delta(), LATE, False
                delta = table.credit(report.engine_had, since=since)
                # Events since then may contradict all of it.
                return delta, CREDITED if delta.added else Finding.EXPLAINED, False
            case Finding.EXPLAINED:
                return Delta(), Finding.EXPLAINED, False


def _has_changed(
    changed_s: Mapping[BlockHash, float],
    is_on_its_way: Callable[[BlockHash], bool],
    since_s: float,
    block: BlockHash,
) -> bool:
    """Whether a block was added to or removed from the index since then, or is about to be."""
    return changed_s.get(block, 0.0) >= since_s or is_on_its_way(block)
