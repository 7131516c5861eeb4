"""Rows of a trace as requests of the fast engine: block ids become block identities. Pure."""

from collections.abc import Sequence

import numpy as np

from loadgen.trace import TraceRow
from workers.simulated.fast.request import ChainRequest


def chain_requests(rows: Sequence[TraceRow], *, block_size_tokens: int) -> list[ChainRequest]:
    """One request per row, named by the row's index; the requests of one call belong together.

    A trace block is cut into blocks of the engine's size. It is another one behind another prefix,
    whatever its id, as for an engine. Identities are small: those of prompts first, then those of
    answers. An answer's blocks are nobody else's: a trace does not say what of a prompt is an
    earlier answer.

    Args:
        rows: with block ids.
        block_size_tokens: of the engine; divides the trace's.

    Raises:
        ValueError: a row has no block ids, or blocks of a size the engine's does not divide.
    """
    for index, row in enumerate(rows):
        if not row.block_ids:
            raise ValueError(f"row {index} has no block ids; the fast engine needs them")
        if row.block_size_tokens % block_size_tokens:
            raise ValueError(
                f"row {index}: blocks of {row.block_size_tokens} tokens cannot be cut into blocks "
                f"of {block_size_tokens}"
            )
    if not rows:
        return []
    parts_max = max(row.block_size_tokens for row in rows) // block_size_tokens
    nodes, nodes_count = _prefix_nodes(rows)
    next_identity = nodes_count * parts_max
    requests = []
    for index, (row, own) in enumerate(zip(rows, nodes, strict=True)):
        parts = row.block_size_tokens // block_size_tokens
        prompt = (np.array(own)[:, None] * parts_max + np.arange(parts)).ravel()
        prompt_blocks = row.prompt_tokens // block_size_tokens
        held_blocks = (row.prompt_tokens + row.output_tokens - 1) // block_size_tokens
        answer_end = next_identity + held_blocks - prompt_blocks
        requests.append(
            ChainRequest(
                request_id=str(index),
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                blocks=np.concatenate(
                    [prompt[:prompt_blocks], np.arange(next_identity, answer_end)]
                ).astype(np.int64, copy=False),
            )
        )
        next_identity = answer_end
    return requests


def _prefix_nodes(rows: Sequence[TraceRow]) -> tuple[list[list[int]], int]:
    """Each block as a number that stands for it and all before it; and how many there are."""
    known: dict[tuple[int, int, int], int] = {}
    nodes = []
    for row in rows:
        node, own = -1, []
        for block_id in row.block_ids:
            node = known.setdefault((node, block_id, row.block_size_tokens), len(known))
            own.append(node)
        nodes.append(own)
    return nodes, len(known)
