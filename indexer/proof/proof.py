"""Holds the index against what engines report: the notices of routers, judged and acted upon."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from indexer.contract.identifiers import BlockHash
from indexer.contract.records import HeartbeatReply
from indexer.proof.notices import Report, Suspicion, Verdict, read, verdict
from indexer.proof.recollection import Marks, RemoteClock
from indexer.publishing.publisher import Publisher
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.telemetry import Telemetry

CREDITED: Final = "credited"
"""The engine had more than the index knew of, and that is published now."""

LATE: Final = "late"
"""The decision is older than what is remembered: nobody can tell."""

MALFORMED: Final = "malformed"


class Proof:
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
        changes = self._publisher.changes
        changed_s, is_on_its_way = changes.latest(), self._publisher.on_their_way()
        found: Counter[str] = Counter()
        deltas, starts_over = [], False
        for raw in notices:
            try:
                report = read(
                    raw,
                    block_size_tokens=self._block_size_tokens,
                    engine_block_size_tokens=self._engine_block_size_tokens,
                )
            except ValueError as error:
                found[MALFORMED] += 1
                self._log.warning("notice_malformed", error=str(error))
                continue
            decided_s = self._clock.earliest_local_s(report.decided_s)
            if not changes.reaches(decided_s):
                found[LATE] += 1
                continue

            def has_changed(block: BlockHash, since_s: float = decided_s) -> bool:
                return changed_s.get(block, 0.0) >= since_s or is_on_its_way(block)

            delta, kind, is_suspicious = self._act(report, decided_s, has_changed, table)
            found[kind] += 1
            deltas.append(delta)
            starts_over |= is_suspicious
        for kind, count in found.items():
            self._telemetry.notices.labels(self._rank, kind).inc(count)
        say = self._log.warning if found[Verdict.WORSE] else self._log.info
        say("notices_judged", **found)
        return deltas, starts_over

    def _act(
        self,
        report: Report,
        decided_s: float,
        has_changed: Callable[[BlockHash], bool],
        table: BlockTable,
    ) -> tuple[Delta, str, bool]:
        """What to publish, how to count it, whether it is the one too many."""
        match verdict(report, has_changed=has_changed, is_held=table.holds):
            case Verdict.WORSE:
                return Delta(), Verdict.WORSE, self._suspicion.worse(time.monotonic())
            case Verdict.BETTER:
                since = self._marks.at(decided_s)
                if since is None:
                    return Delta(), LATE, False
                delta = table.credit(report.held, since=since)
                # Events since then may contradict all of it.
                return delta, CREDITED if delta.added else Verdict.EXPLAINED, False
            case Verdict.EXPLAINED:
                return Delta(), Verdict.EXPLAINED, False
