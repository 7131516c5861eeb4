"""Pure: the project's own format; every field is described in docs/traces.md."""

from collections.abc import Sequence

from loadgen.trace_row import MOONCAKE_BLOCK_SIZE_TOKENS, TraceRow
from loadgen.workloads.fields import (
    Fields,
    integer,
    integers,
    number,
    optional_number,
    optional_text,
)


def timestable_row(fields: Fields) -> TraceRow:
    """The row of one JSON object. Raises ValueError with a reason."""
    block_ids = integers(fields, "block_ids") if "block_ids" in fields else ()
    return TraceRow(
        arrival_s=number(fields, "arrival_s"),
        prompt_tokens=integer(fields, "prompt_tokens"),
        output_tokens=integer(fields, "output_tokens"),
        block_ids=block_ids,
        block_size_tokens=integer(fields, "block_size_tokens")
        if block_ids
        else MOONCAKE_BLOCK_SIZE_TOKENS,
        session_id=optional_text(fields, "session_id"),
        turn=integer(fields, "turn") if fields.get("turn") is not None else None,
        token_ids=integers(fields, "token_ids") if "token_ids" in fields else None,
        text=optional_text(fields, "text"),
        request_id=optional_text(fields, "request_id"),
        parent_id=optional_text(fields, "parent_id"),
        category=optional_text(fields, "category"),
        think_s=optional_number(fields, "think_s"),
    )


def timestable_fields(row: TraceRow) -> dict[str, float | int | str | Sequence[int]]:
    """JSON fields of a row; absent values are left out."""
    fields: dict[str, float | int | str | Sequence[int]] = {
        "arrival_s": row.arrival_s,
        "prompt_tokens": row.prompt_tokens,
        "output_tokens": row.output_tokens,
    }
    optional: dict[str, float | int | str | None] = {
        "session_id": row.session_id,
        "turn": row.turn,
        "request_id": row.request_id,
        "parent_id": row.parent_id,
        "category": row.category,
        "think_s": row.think_s,
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    if row.token_ids is not None:
        fields["token_ids"] = row.token_ids
    elif row.text is not None:
        fields["text"] = row.text
    else:
        fields["block_size_tokens"] = row.block_size_tokens
        fields["block_ids"] = row.block_ids
    return fields
