"""What a router's notice means to the sidecar it is for; pure.

A router predicts hit tokens from the index, the engine reports cached tokens with its answer, and
where they differ the router sends both with the prompt's chain. The prediction was made at the
decision, the hit happened at admission, and the engine's events may have come later still: so
first it is asked whether the index has changed in between.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgpack

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES, NOTICE_BLOCKS_MAX, PROMPT_TOKENS_MAX
from indexer.contract.records import Notice

SUSPICIONS_MAX: Final = 3
SUSPICION_S: Final = 30.0
"""So many unexplained notices of too much credit within that time are a reason to start over."""

RESYNC_EVERY_MIN_S: Final = 30.0
RESYNC_EVERY_MAX_S: Final = 600.0
"""Between two resynchronisations; doubled by each until there was none for the longest time."""


NOTICE_BYTES_MAX: Final = NOTICE_BLOCKS_MAX * BLOCK_HASH_BYTES + 1024
"""The longest chain, and room for the other fields and their names."""

REASON_CHARACTERS_MAX: Final = 200
"""Of a refusal, which may quote what it refuses: it goes into a log line."""


class Finding(StrEnum):
    """What a report amounts to.

    Attributes:
        EXPLAINED: a block of the difference has changed since the decision, or the index says the
            same by now, or the difference is finer than a canonical block.
        UNDER: the engine had more than the index knows of.
        OVER: the engine had less than the index still claims.
    """

    EXPLAINED = "explained"
    UNDER = "under"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A notice in canonical blocks.

    Attributes:
        decided_s: Redis time of the decision.
        is_over: the engine had less than predicted.
        engine_had: the leading blocks that the engine had in full.
        difference: the blocks that only one of both knew of.
    """

    decided_s: float
    is_over: bool
    engine_had: Sequence[BlockHash]
    difference: Sequence[BlockHash]


def read(raw: bytes, *, block_size_tokens: int, engine_block_size_tokens: int) -> Report:
    """Decode a notice.

    Args:
        raw: as it came from Redis.
        block_size_tokens: the fleet's.
        engine_block_size_tokens: the engine's own; it has reported whole ones.

    Raises:
        ValueError: it is none, or says what cannot be.
    """
    if len(raw) > NOTICE_BYTES_MAX:
        raise ValueError(f"{len(raw)} bytes are above {NOTICE_BYTES_MAX}")
    try:
        notice = Notice.decode(raw)
    except (TypeError, ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError(f"not a notice: {error!r}"[:REASON_CHARACTERS_MAX]) from error
    tokens = (notice.predicted_tokens, notice.actual_tokens)
    if type(notice.decided_s) not in (int, float) or not math.isfinite(notice.decided_s):
        raise ValueError("decided_s is no time")
    if not all(type(count) is int and 0 <= count <= PROMPT_TOKENS_MAX for count in tokens):
        raise ValueError(f"no counts of tokens: {tokens}"[:REASON_CHARACTERS_MAX])
    if type(notice.hashes) is not bytes or len(notice.hashes) % BLOCK_HASH_BYTES:
        raise ValueError("hashes are no chain")
    predicted_tokens, actual_tokens = tokens
    actual_tokens -= actual_tokens % engine_block_size_tokens
    is_over = actual_tokens < predicted_tokens
    engine_had_count = actual_tokens // block_size_tokens
    predicted_count = predicted_tokens // block_size_tokens
    if is_over:  # a block is refuted when any of its tokens was not there
        predicted_count = -(-predicted_tokens // block_size_tokens)
    count = max(engine_had_count, predicted_count)
    if not count <= len(notice.hashes) // BLOCK_HASH_BYTES <= NOTICE_BLOCKS_MAX:
        raise ValueError(f"{len(notice.hashes)} bytes of hashes for {count} blocks")
    chain = block_hash.split(notice.hashes[: count * BLOCK_HASH_BYTES])
    first = min(engine_had_count, predicted_count)
    return Report(
        decided_s=notice.decided_s,
        is_over=is_over,
        engine_had=chain[:engine_had_count],
        difference=chain[first:],
    )


def finding(
    report: Report,
    *,
    has_changed: Callable[[BlockHash], bool],
    is_published: Callable[[BlockHash], bool],
) -> Finding:
    """Judge a report.

    Args:
        report: of an engine and a prediction.
        has_changed: whether a block was added to or removed from the index since the decision, or
            is about to be.
        is_published: whether the index is to hold a block now.
    """
    if any(map(has_changed, report.difference)):
        return Finding.EXPLAINED
    if report.is_over:
        return Finding.OVER if all(map(is_published, report.difference)) else Finding.EXPLAINED
    return Finding.EXPLAINED if all(map(is_published, report.difference)) else Finding.UNDER


class Suspicion:
    """Counts unexplained notices until they are a reason to start over, and spaces that out."""

    def __init__(self) -> None:
        self._noticed_s: deque[float] = deque(maxlen=SUSPICIONS_MAX)
        self._resynced_s = -math.inf
        self._every_s = RESYNC_EVERY_MIN_S

    def note_over(self, now_s: float) -> bool:
        """Take note of one; True when a resynchronisation is due, and counted as done."""
        self._noticed_s.append(now_s)
        if len(self._noticed_s) < SUSPICIONS_MAX or now_s - self._noticed_s[0] > SUSPICION_S:
            return False
        since_s = now_s - self._resynced_s
        if since_s < self._every_s:
            return False
        was_calm = since_s >= RESYNC_EVERY_MAX_S
        longer_s = min(2 * self._every_s, RESYNC_EVERY_MAX_S)
        self._every_s = RESYNC_EVERY_MIN_S if was_calm else longer_s
        self._resynced_s = now_s
        self._noticed_s.clear()
        return True
