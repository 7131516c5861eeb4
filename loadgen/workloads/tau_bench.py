"""Pure: customer-service conversations with tools (github.com/sierra-research/tau-bench, MIT).

One line is one conversation: `task_id`, `trial` (may be missing), `traj` (chat messages in OpenAI
form). Each assistant message is one request whose prompt is every message before it. There are no
times: `session_rate` has to be chosen, think times are exponential with mean `tool_think_s` after a
tool's message and `user_think_s` after a person's, and an answer is assumed to take `ttft_s` and
`tpot_s` per further token. Token counts are characters over `chars_per_token`; the prompt becomes
block ids of its text or stays text (`text_as`).
"""

import json
from dataclasses import dataclass, field

import numpy as np

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import prompt_of_text, text_tokens
from loadgen.workloads.fields import Fields, integer, objects, text
from loadgen.workloads.options import ReadOptions, SessionStarts


@dataclass(slots=True)
class TauBenchReader:
    """One conversation a line."""

    options: ReadOptions
    _generator: np.random.Generator = field(init=False)
    _starts: SessionStarts | None = None
    _conversations_count: int = 0

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng([self.options.seed, 13])

    def rows(self, fields: Fields) -> list[TraceRow]:
        """The requests of one line. Raises ValueError with a reason."""
        self._starts = self._starts or SessionStarts.of(self.options)
        options = self.options
        session_id = f"task-{integer(fields, 'task_id')}-{self._conversations_count}"
        self._conversations_count += 1
        rows: list[TraceRow] = []
        prompt, last_role = "", ""
        arrival_s, think_s = self._starts.next_s(), None
        for message in objects(fields, "traj"):
            role, words = text(message, "role"), _words(message)
            if role == "assistant" and prompt:
                if rows:
                    think_s = self._think_s(last_role)
                    arrival_s += _answer_s(rows[-1].output_tokens, options) + think_s
                rows.append(
                    TraceRow(
                        arrival_s=round(arrival_s, 6),
                        output_tokens=text_tokens(words, options.chars_per_token),
                        session_id=session_id,
                        turn=len(rows),
                        category=last_role,
                        think_s=think_s,
                        **prompt_of_text(prompt, options),
                    )
                )
            prompt += f"{role}: {words}\n"
            last_role = role
        return rows

    def finish(self) -> list[TraceRow]:
        """Nothing is held back."""
        return []

    def _think_s(self, last_role: str) -> float:
        options = self.options
        mean_s = options.tool_think_s if last_role == "tool" else options.user_think_s
        return round(float(self._generator.exponential(mean_s)), 6)


def _answer_s(output_tokens: int, options: ReadOptions) -> float:
    return options.ttft_s + options.tpot_s * (output_tokens - 1)


def _words(message: Fields) -> str:
    """Content and tool calls of a message, as one text."""
    content = message.get("content")
    words = content if isinstance(content, str) else ""
    calls = message.get("tool_calls")
    return f"{words}{json.dumps(calls)}" if calls else words
