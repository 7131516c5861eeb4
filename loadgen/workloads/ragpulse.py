"""Pure: questions answered with retrieval (github.com/flashserve/RAGPulse, MIT), in two files.

The trace: `timestamp` (text, s), `input_length`, `output_length` (tokens), `hash_ids` (lists of
component ids by kind), `session_id`. The components: an id under the name of its kind, and
`token_length`. Prompts are laid out as system prompt, passages, history, web search, user input;
the few tokens that `input_length` has beyond them (6 to 12 in the published file) come last.
Components are whole texts of their own lengths; here they are cut into blocks of
`block_size_tokens`, and equal ids stand for equal tokens up to and with the block.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import piece_blocks
from loadgen.workloads.fields import Fields, checked_integers, integer, text
from loadgen.workloads.options import ReadOptions

_LAYOUT = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_COMPONENT_IDS = (
    "sys_prompt_id",
    "passage_id",
    "history_id",
    "web_search_id",
    "user_input_id",
)
_TEMPLATE = -1  # the tokens beyond all components


def component(fields: Fields) -> tuple[int, int]:
    """Id and length in tokens of one component row. Raises ValueError."""
    name = next((name for name in _COMPONENT_IDS if name in fields), None)
    if name is None:
        raise ValueError(f"expected one of {', '.join(_COMPONENT_IDS)}")
    return integer(fields, name), integer(fields, "token_length")


def is_component(fields: Fields) -> bool:
    """Whether a row belongs to a file of components."""
    return "token_length" in fields and any(name in fields for name in _COMPONENT_IDS)


@dataclass(slots=True)
class RagpulseReader:
    """One request a line.

    Args:
        options: see the module.
        token_length: of every component, by id.
    """

    options: ReadOptions
    token_length: dict[int, int]

    def rows(self, fields: Fields) -> list[TraceRow]:
        """The row of one line. Raises ValueError with a reason."""
        prompt_tokens = integer(fields, "input_length")
        pieces = list(self._pieces(fields))
        rest = prompt_tokens - sum(length for _, length in pieces)
        if rest < 0:
            raise ValueError(f"the components have {-rest} tokens more than input_length")
        pieces.append((_TEMPLATE, rest))
        return [
            TraceRow(
                arrival_s=_seconds(fields),
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, integer(fields, "output_length")),
                block_ids=piece_blocks(pieces, self.options.block_size_tokens),
                block_size_tokens=self.options.block_size_tokens,
                session_id=text(fields, "session_id"),
                category=_category(fields),
            )
        ]

    def finish(self) -> list[TraceRow]:
        """Nothing is held back."""
        return []

    def _pieces(self, fields: Fields) -> Iterable[tuple[int, int]]:
        kinds = fields.get("hash_ids")
        if not isinstance(kinds, dict):
            raise ValueError("hash_ids must be an object of lists")  # noqa: TRY004
        for kind in _LAYOUT:
            values = kinds.get(kind, [])
            if not isinstance(values, list):
                raise ValueError(f"hash_ids.{kind} must be a list")  # noqa: TRY004
            for piece in checked_integers(values, f"hash_ids.{kind}"):
                if piece not in self.token_length:
                    raise ValueError(f"component {piece} of {kind} is not in the components file")
                yield piece, self.token_length[piece]


def _category(fields: Fields) -> str:
    """What was retrieved for the request."""
    kinds = fields.get("hash_ids")
    assert isinstance(kinds, dict), "checked when the pieces were read"
    found = [name for name in ("passages_ids", "web_search") if kinds.get(name)]
    return "+".join(found) or "plain"


def _seconds(fields: Fields) -> float:
    value = fields.get("timestamp")
    try:
        return float(value) if isinstance(value, str | int | float) else float("nan")
    except (ValueError, OverflowError) as exc:
        raise ValueError(f"timestamp must be seconds, got {value!r:.60}") from exc
