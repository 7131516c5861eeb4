"""Pure: the Bailian format (github.com/alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0).

The trace behind "KVCache Cache in the Wild" (arXiv 2506.02634): `chat_id`, `parent_chat_id` (-1 for
a first turn), `timestamp` (s), `input_length`, `output_length` (tokens), `type` (text, search,
image, file), `turn` (from 1), `hash_ids` (one id per 16-token block; recordings of the router say
`block_size` where it is another). A session is named by its first request; where that lies before
the trace, by the earliest ancestor that is named. Only an earlier line tells which session a parent
belongs to, so a reader keeps a small entry per request.
"""

from dataclasses import dataclass, field

from loadgen.trace_row import TraceRow
from loadgen.workloads.fields import Fields, integer, integers, number, optional_text

BAILIAN_BLOCK_SIZE_TOKENS = 16
CHATS_MAX = 20_000_000  # about 100 bytes each


@dataclass(slots=True)
class BailianReader:
    """Remembers which session each chat id belongs to."""

    _session_of: dict[int, int] = field(default_factory=dict)

    def row(self, fields: Fields) -> TraceRow:
        """The row of one JSON object. Raises ValueError with a reason."""
        chat_id = integer(fields, "chat_id")
        first = fields.get("parent_chat_id") == -1
        parent = chat_id if first else integer(fields, "parent_chat_id")
        known = not first and parent in self._session_of
        session = self._session_of.get(parent, parent)
        turn = integer(fields, "turn")
        if turn < 1:
            raise ValueError("turn must count from 1")
        row = TraceRow(
            arrival_s=number(fields, "timestamp"),
            prompt_tokens=integer(fields, "input_length"),
            output_tokens=integer(fields, "output_length"),
            block_ids=integers(fields, "hash_ids"),
            block_size_tokens=integer(fields, "block_size")
            if "block_size" in fields
            else BAILIAN_BLOCK_SIZE_TOKENS,
            session_id=f"chat-{session}",
            turn=turn - 1,
            request_id=str(chat_id),
            parent_id=str(parent) if known else None,
            category=optional_text(fields, "type"),
        )
        if len(self._session_of) >= CHATS_MAX:
            raise ValueError(f"more than {CHATS_MAX} requests; split the file")
        self._session_of[chat_id] = session
        return row
