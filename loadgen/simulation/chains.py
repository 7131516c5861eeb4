"""Rows of a trace as requests of the fast engine: block ids become block identities. Pure."""

from collections.abc import Sequence

import numpy as np

from loadgen.trace import TraceRow
from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.request import ChainRequest


def chain_requests(
    rows: Sequence[TraceRow],
    *,
    block_size_tokens: int,
    previous: Sequence[int | None] | None = None,
) -> list[ChainRequest]:
    """One request per row, named by the row's index; the requests of one call belong together.

    A trace block is cut into blocks of the engine's size. It is another one behind another prefix,
    whatever its id, as for an engine. Identities are small: those of prompts first, then those of
    answers.

    A trace does not say what of a prompt is an earlier answer. Where a row continues another one
    and begins with all its full blocks, what follows them is taken to be the rest of that prompt
    and its answer, so that the engine that gave the answer holds them; of several continuations the
    first. Any other answer's blocks are nobody else's.

    Args:
        rows: with block ids.
        block_size_tokens: of the engine; divides the trace's.
        previous: the row that each continues, an earlier one; None: no answer is continued.

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
    following = _first_continuations(rows, nodes, previous)
    requests: list[ChainRequest] = []
    prompts: dict[int, Identities] = {}  # of rows that continue another one
    for index in reversed(range(len(rows))):  # what continues a row is known before the row
        row = rows[index]
        held_blocks = (row.prompt_tokens + row.output_tokens - 1) // block_size_tokens
        child = following.get(index)
        if child is not None:
            known = prompts.pop(child)[:held_blocks]
        else:
            parts = row.block_size_tokens // block_size_tokens
            known = (np.array(nodes[index])[:, None] * parts_max + np.arange(parts)).ravel()
            known = known[: row.prompt_tokens // block_size_tokens]
        answer_end = next_identity + held_blocks - len(known)
        blocks = np.concatenate([known, np.arange(next_identity, answer_end)])
        next_identity = answer_end
        requests.append(
            ChainRequest(
                request_id=str(index),
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                blocks=blocks.astype(np.int64, copy=False),
            )
        )
        if previous is not None and previous[index] is not None:
            prompts[index] = blocks[: row.prompt_tokens // block_size_tokens]
    requests.reverse()
    return requests


def _first_continuations(
    rows: Sequence[TraceRow],
    nodes: Sequence[Sequence[int]],
    previous: Sequence[int | None] | None,
) -> dict[int, int]:
    """Row -> the first row that continues it and begins with its prompt, as far as blocks tell."""
    following: dict[int, int] = {}
    for index, parent in enumerate(previous or ()):
        if parent is None or parent in following:
            continue
        before, row = rows[parent], rows[index]
        full = before.prompt_tokens // before.block_size_tokens
        begins_alike = full == 0 or (
            full <= len(nodes[index]) and nodes[index][full - 1] == nodes[parent][full - 1]
        )
        if begins_alike and row.prompt_tokens > before.prompt_tokens:
            following[parent] = index
    return following


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
