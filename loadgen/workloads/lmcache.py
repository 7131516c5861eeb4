"""Pure: agent conversations with real text (github.com/LMCache/lmcache-agent-trace, Apache-2.0).

`timestamp` (Unix, microseconds), `input` (the whole prompt), `output`, `session_id`. The rows of a
conversation stand together in the file but not always in order of time; one conversation is held at
a time. Token counts are characters over `chars_per_token`. The prompt becomes block ids of its text
or stays text (`text_as`). Conversations begin when they did (one after another) or, with
`session_rate`, as a Poisson process.
"""

from dataclasses import dataclass, field, replace

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import prompt_of_text, text_tokens
from loadgen.workloads.fields import Fields, integer, text
from loadgen.workloads.options import ReadOptions, SessionStarts


@dataclass(slots=True)
class LmcacheReader:
    """Rows of a conversation come out once the next one begins."""

    options: ReadOptions
    _held: list[TraceRow] = field(default_factory=list)
    _first_s: float | None = None
    _starts: SessionStarts | None = None

    def rows(self, fields: Fields) -> list[TraceRow]:
        """The conversation before, when this line begins another. Raises ValueError."""
        session_id = text(fields, "session_id")
        row = TraceRow(
            arrival_s=integer(fields, "timestamp") / 1e6,
            output_tokens=text_tokens(text(fields, "output"), self.options.chars_per_token),
            session_id=session_id,
            **prompt_of_text(text(fields, "input"), self.options),
        )
        done = self.finish() if self._held and self._held[0].session_id != session_id else []
        self._held.append(row)
        return done

    def finish(self) -> list[TraceRow]:
        """The conversation held, in order of time. Raises ValueError."""
        rows = sorted(self._held, key=lambda row: row.arrival_s)
        self._held = []
        if not rows:
            return []
        begins_s = rows[0].arrival_s
        if self._first_s is None:
            self._first_s = begins_s
        start_s = begins_s - self._first_s
        if self.options.session_rate is not None:
            self._starts = self._starts or SessionStarts.of(self.options)
            start_s = self._starts.next_s()
        if start_s < 0:
            raise ValueError(
                f"conversation {rows[0].session_id} begins before the file's first; sort "
                "conversations by their start or choose --session_rate"
            )
        return [
            replace(row, arrival_s=round(start_s + row.arrival_s - begins_s, 6), turn=turn)
            for turn, row in enumerate(rows)
        ]
