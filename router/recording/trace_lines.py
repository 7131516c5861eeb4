"""Pure: answered requests as lines of a trace in the Bailian format.

`chat_id` counts; `parent_chat_id` is the request that this one continues: the last of its session
where the client names one, else the latest whose whole prompt it begins with; -1 for a first turn,
and a number that no line has where the parent is not known. `hash_ids` has an id for each block of
the prompt, the partly filled one too. `block_size`, which other traces of the format do not have,
stands where blocks are not of 16 tokens.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from pydantic_core import to_json

from indexer.contract.limits import BLOCK_HASH_BYTES
from router.recording.anonymous import KEY_BYTES, block_ids, unique_ids

Key = TypeVar("Key")

FORMAT_BLOCK_SIZE_TOKENS: Final = 16

REMEMBERED_MAX: Final = 65_536
"""Sessions, and ends of prompts, about 200 bytes each: the least recently used are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that has been answered.

    Attributes:
        accepted_s: when it came, seconds from the beginning of the trace.
        hashes: of the prompt's full blocks, as far as they are known.
        block_size_tokens: tokens of each.
        prompt_tokens: length of the prompt.
        output_tokens: of the answer.
        kind: of request, one of a few.
        turn: answers before it in the conversation.
        session_id: a hint of the client; it is not written.
    """

    accepted_s: float
    hashes: bytes
    block_size_tokens: int
    prompt_tokens: int
    output_tokens: int
    kind: str
    turn: int
    session_id: str | None


class TraceLines:
    """Makes the lines of one trace.

    Args:
        key: secret, of this trace alone; KEY_BYTES long.
        remembered_max: sessions, and ends of prompts, that may be continued.
    """

    def __init__(self, key: bytes, *, remembered_max: int = REMEMBERED_MAX) -> None:
        assert len(key) == KEY_BYTES, len(key)
        self._key = key
        self._remembered_max = remembered_max
        self._chats_count = 0
        self._sessions: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._ends: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def lines(self, batch: Sequence[Answered]) -> list[bytes]:
        """The next lines, of the same order; those of earlier turns have to come before."""
        known = [
            one.hashes[: one.prompt_tokens // one.block_size_tokens * BLOCK_HASH_BYTES]
            for one in batch
        ]
        ids = iter(block_ids(b"".join(known), self._key))
        counts = [len(hashes) // BLOCK_HASH_BYTES for hashes in known]
        return [
            self._line(one, list(islice(ids, count)))
            for one, count in zip(batch, counts, strict=True)
        ]

    def _line(self, answered: Answered, ids: list[int]) -> bytes:
        size, tokens = answered.block_size_tokens, answered.prompt_tokens
        parent, turn = self._continued(answered, ids)
        chat = self._next_chat()
        self._remember(answered, ids, chat, turn)
        # What is not hashed is nobody else's: beyond the longest lookup, and the last block's rest.
        ids += unique_ids(-(-tokens // size) - len(ids))
        fields: dict[str, object] = {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": round(answered.accepted_s, 3),
            "input_length": tokens,
            "output_length": max(1, answered.output_tokens),
            "type": answered.kind,
            "turn": turn,
            "hash_ids": ids,
        }
        if size != FORMAT_BLOCK_SIZE_TOKENS:
            fields["block_size"] = size
        return to_json(fields) + b"\n"

    def _continued(self, answered: Answered, ids: list[int]) -> tuple[int, int]:
        """Chat id of the parent, and this turn counted from 1."""
        before = None
        if answered.session_id is not None:
            before = self._sessions.get(answered.session_id)
        elif answered.turn:
            before = next(filter(None, map(self._ends.get, reversed(ids))), None)
        if before is not None:
            return before[0], max(answered.turn, before[1]) + 1
        if answered.turn:
            return self._next_chat(), answered.turn + 1
        return -1, 1

    def _remember(self, answered: Answered, ids: list[int], chat: int, turn: int) -> None:
        if answered.session_id is not None:
            _put(self._sessions, answered.session_id, (chat, turn), self._remembered_max)
        elif ids:
            _put(self._ends, ids[-1], (chat, turn), self._remembered_max)

    def _next_chat(self) -> int:
        self._chats_count += 1
        return self._chats_count


def _put(
    held: OrderedDict[Key, tuple[int, int]], key: Key, value: tuple[int, int], most: int
) -> None:
    held[key] = value
    held.move_to_end(key)
    if len(held) > most:
        held.popitem(last=False)
