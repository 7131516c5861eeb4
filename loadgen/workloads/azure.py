"""Pure: the Azure LLM inference traces of 2023 (github.com/Azure/AzurePublicDataset, CC-BY-4.0).

Patel et al., "Splitwise", ISCA 2024. `TIMESTAMP` (wall clock), `ContextTokens`, `GeneratedTokens`,
as JSON Lines. Neither sessions nor blocks: how prompts are made has to be chosen (`prompts`).
Arrivals count from the first row, so rows must not be earlier than it.
"""

from dataclasses import dataclass, field
from datetime import datetime

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import PromptBlocks
from loadgen.workloads.fields import Fields, integer, text
from loadgen.workloads.options import ReadOptions

_SECOND_DIGITS = len("2023-11-16 18:17:03")


@dataclass(slots=True)
class AzureReader:
    """One request a line."""

    options: ReadOptions
    _blocks: PromptBlocks = field(init=False)
    _start: tuple[datetime, float] | None = None
    _requests_count: int = 0

    def __post_init__(self) -> None:
        self._blocks = PromptBlocks(self.options)

    def rows(self, fields: Fields) -> list[TraceRow]:
        """The row of one line. Raises ValueError with a reason."""
        second, fraction_s = _timestamp(text(fields, "TIMESTAMP"))
        if self._start is None:
            self._start = (second, fraction_s)
        arrival_s = (second - self._start[0]).total_seconds() + fraction_s - self._start[1]
        if arrival_s < 0:
            raise ValueError("TIMESTAMP is before that of the first row; sort the file by it")
        prompt_tokens = integer(fields, "ContextTokens")
        self._requests_count += 1
        return [
            TraceRow(
                arrival_s=round(arrival_s, 7),
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, integer(fields, "GeneratedTokens")),
                block_ids=self._blocks.blocks(max(1, prompt_tokens)),
                block_size_tokens=self.options.block_size_tokens,
                session_id=f"request-{self._requests_count}",
                turn=0,
            )
        ]

    def finish(self) -> list[TraceRow]:
        """Nothing is held back."""
        return []


def _timestamp(value: str) -> tuple[datetime, float]:
    """Whole second and fraction; datetime alone would lose the last of seven digits."""
    try:
        fraction_s = float(f"0{value[_SECOND_DIGITS:]}")
        return datetime.fromisoformat(value[:_SECOND_DIGITS]), fraction_s
    except ValueError as exc:
        raise ValueError(f"TIMESTAMP must be like 2023-11-16 18:17:03.97, got {value!r}") from exc
