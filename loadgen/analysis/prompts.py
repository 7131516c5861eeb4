"""Pure: the full blocks of any prompt of a trace."""

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import text_blocks, text_tokens
from loadgen.workloads.options import ReadOptions

Ids = npt.NDArray[np.int64]


def full_block_ids(row: TraceRow, options: ReadOptions) -> tuple[Ids, int, int]:
    """Ids of the completely filled blocks, tokens of the prompt, tokens per block.

    Prompts of token ids and of text are cut into blocks of the options' size.
    """
    if row.block_ids:
        ids = np.array(row.block_ids, dtype=np.int64)
        return ids[: row.prompt_tokens // row.block_size_tokens], *_sizes(row)
    size = options.block_size_tokens
    if row.text is not None:
        tokens = text_tokens(row.text, options.chars_per_token)
        blocks = text_blocks(
            row.text, chars_per_token=options.chars_per_token, block_size_tokens=size
        )
        return np.array(blocks[: tokens // size], dtype=np.int64), tokens, size
    token_ids = np.array(row.token_ids or (), dtype=np.int64)
    digests = [
        xxh3_64_intdigest(token_ids[start : start + size].tobytes()) >> 1
        for start in range(0, len(token_ids) - size + 1, size)
    ]
    return np.array(digests, dtype=np.int64), row.prompt_tokens, size


def _sizes(row: TraceRow) -> tuple[int, int]:
    return row.prompt_tokens, row.block_size_tokens
