"""Pure: one request of a trace, whatever format it came from."""

from dataclasses import dataclass

MOONCAKE_BLOCK_SIZE_TOKENS = 512
PROMPT_TOKENS_MAX = 10_000_000  # far above any model: a larger figure is a wrong unit
OUTPUT_TOKENS_MAX = BLOCK_SIZE_TOKENS_MAX = TURN_MAX = PROMPT_TOKENS_MAX
ARRIVAL_S_MAX = 10_000_000_000  # 300 years: seconds since 1970 fit, milliseconds do not


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace. Raises ValueError with a reason when the fields contradict.

    Args:
        arrival_s: seconds from the start of the trace.
        prompt_tokens: prompt length.
        output_tokens: answer length, which the engine is told to produce exactly.
        block_ids: one id per block of block_size_tokens; empty when token_ids or text is given.
        block_size_tokens: the trace's block size, independent of any engine's.
        session_id: conversation, where the trace labels it.
        turn: place in the conversation from 0, where the trace labels it.
        token_ids: the prompt itself.
        text: the prompt itself, sent as one chat message.
        request_id: name of this row, where other rows refer to it.
        parent_id: request_id of the row whose answer this one waits for; None: the row before it
            of the same session, or none.
        category: kind of request, where the trace names one.
        think_s: pause between the parent's answer and this request, where the trace states it.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_size_tokens: int = MOONCAKE_BLOCK_SIZE_TOKENS
    session_id: str | None = None
    turn: int | None = None
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    request_id: str | None = None
    parent_id: str | None = None
    category: str | None = None
    think_s: float | None = None

    def __post_init__(self) -> None:
        _check_range("arrival", self.arrival_s, 0, ARRIVAL_S_MAX, " s")
        if self.think_s is not None and not 0 <= self.think_s < float("inf"):
            raise ValueError(f"think time must be a finite number >= 0, got {self.think_s}")
        _check_range("prompt length", self.prompt_tokens, 1, PROMPT_TOKENS_MAX, " tokens")
        _check_range("output length", self.output_tokens, 1, OUTPUT_TOKENS_MAX, " tokens")
        _check_range("block size", self.block_size_tokens, 1, BLOCK_SIZE_TOKENS_MAX, " tokens")
        _check_range("turn", self.turn or 0, 0, TURN_MAX)
        given = bool(self.block_ids) + (self.token_ids is not None) + (self.text is not None)
        if given != 1:
            raise ValueError("exactly one of block ids, token ids and text must be given")
        blocks = -(-self.prompt_tokens // self.block_size_tokens)
        if self.block_ids and len(self.block_ids) != blocks:
            raise ValueError(
                f"{self.prompt_tokens} prompt tokens need {blocks} block ids of "
                f"{self.block_size_tokens} tokens, got {len(self.block_ids)}"
            )
        if self.token_ids is not None and len(self.token_ids) != self.prompt_tokens:
            raise ValueError(
                f"prompt length is {self.prompt_tokens}, but {len(self.token_ids)} token ids"
            )

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Ids of the completely filled blocks."""
        return self.block_ids[: self.prompt_tokens // self.block_size_tokens]


def _check_range(what: str, value: float, least: int, most: int, unit: str = "") -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} must be {least} to {most}{unit}, got {value}")
