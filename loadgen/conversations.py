"""Pure: which request of a trace continues which."""

from collections.abc import Sequence

from loadgen.trace_row import TraceRow


def previous_turns(rows: Sequence[TraceRow]) -> tuple[int | None, ...]:
    """For each row the index of the row it continues, None for a first turn.

    A row that names its parent continues that one, if it is among the rows before. Another labelled
    row continues the row before it with the same session_id. An unlabelled one
    continues the latest earlier row all of whose full blocks it begins with, provided those are
    more than the leading blocks common to every row (a system prompt is no conversation).
    """
    ignored_blocks = _common_blocks(rows)
    node_of: dict[tuple[int, int], int] = {}  # (parent node, block id) -> node of the chain
    last_row_at: dict[int, int] = {}  # node -> latest row whose full blocks end there
    last_of_session: dict[str, int] = {}
    row_of: dict[str, int] = {}
    previous: list[int | None] = []
    for index, row in enumerate(rows):
        named = None if row.parent_id is None else row_of.get(row.parent_id)
        if row.request_id is not None:
            row_of[row.request_id] = index
        if row.session_id is not None:
            before = last_of_session.get(row.session_id)
            previous.append(before if named is None else named)
            last_of_session[row.session_id] = index
            continue
        if named is not None:
            previous.append(named)
            continue
        parent: int | None = None
        node = -1
        for depth, block_id in enumerate(row.full_blocks, 1):
            node = node_of.setdefault((node, block_id), len(node_of))
            candidate = last_row_at.get(node) if depth > ignored_blocks else None
            if candidate is not None and (parent is None or candidate > parent):
                parent = candidate
        if len(row.full_blocks) > ignored_blocks:
            last_row_at[node] = index
        previous.append(parent)
    return tuple(previous)


def conversation_labels(rows: Sequence[TraceRow]) -> tuple[int, ...]:
    """For each row the index of the first row of its conversation."""
    labels: list[int] = []
    for index, parent in enumerate(previous_turns(rows)):
        labels.append(index if parent is None else labels[parent])
    return tuple(labels)


def _common_blocks(rows: Sequence[TraceRow]) -> int:
    """Leading full blocks that all unlabelled rows with any share; 0 for fewer than two rows."""
    chains = [row.full_blocks for row in rows if row.session_id is None and row.full_blocks]
    if len(chains) <= 1:
        return 0
    # Lexicographic extremes: what the least and the greatest share, all share.
    least, greatest = min(chains), max(chains)
    return next(
        (i for i, (a, b) in enumerate(zip(least, greatest, strict=False)) if a != b),
        min(len(least), len(greatest)),
    )
