"""Pure: the Mooncake format (Qin et al., "Mooncake", FAST 2025; github.com/kvcache-ai/Mooncake).

`timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one id per 512-token block;
an id stands for the block and all before it). Sessions are not labelled; `loadgen.conversations`
finds them by their blocks. Timestamps of the published traces come in steps of 3 s.
"""

from loadgen.trace_row import MOONCAKE_BLOCK_SIZE_TOKENS, TraceRow
from loadgen.workloads.fields import Fields, integer, integers, number


def mooncake_row(fields: Fields) -> TraceRow:
    """The row of one JSON object. Raises ValueError with a reason."""
    return TraceRow(
        arrival_s=number(fields, "timestamp") / 1000,
        prompt_tokens=integer(fields, "input_length"),
        output_tokens=integer(fields, "output_length"),
        block_ids=integers(fields, "hash_ids"),
        block_size_tokens=MOONCAKE_BLOCK_SIZE_TOKENS,
    )
