"""A block table as plain columns for a checkpoint, and back; pure.

A column holds one value per block, in the table's order; parents and marks are told by the engine's
names. Everything is what msgpack packs and gives back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES
from indexer.errors import MalformedCheckpoint
from indexer.table.engine_block import EngineBlock, Rest
from indexer.table.residency import Residency

DUMP_VERSION: Final = 1

Blocks = dict[EngineBlockHash, EngineBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a dump holds.

    Attributes:
        blocks: with their places in the tree, none published.
        published_at: `EngineBlock.published_at` of each.
        residency: copies and marks.
        mark: the table's mark.
    """

    blocks: Blocks
    published_at: list[int]
    residency: Residency
    mark: int


def dump(
    scope: Mapping[str, object], blocks: Blocks, residency: Residency, mark: int
) -> dict[str, object]:
    """Columns of a table; `scope` says which hashes it holds."""
    values = blocks.values()
    return {
        **scope,
        "version": DUMP_VERSION,
        "mark": mark,
        "names": list(blocks),
        "parents": [None if block.parent is None else block.parent.key for block in values],
        "counts": [block.count for block in values],
        "published_at": [block.published_at for block in values],
        "hashes": [block.hashes for block in values],
        "rests": [(n, *block.rest) for n, block in enumerate(values) if block.rest is not None],
        "groups": list(residency.groups),
        "partial_groups": list(residency.partial_groups),
        "places": [
            (medium, group, list(copies), list(copies.values()))
            for (medium, group), copies in residency.places.items()
        ],
        "doubted": (list(residency.doubted), list(residency.doubted.values())),
        "evident": list(residency.evident),
        "withheld": list(residency.withheld),
    }


def load(raw: object, scope: Mapping[str, object]) -> Loaded:
    """Read columns back.

    Raises:
        MalformedCheckpoint: they are not those of a table of this scope.
    """
    expected = {"version": DUMP_VERSION, **scope}
    if not isinstance(raw, Mapping) or any(raw.get(k) != v for k, v in expected.items()):
        raise MalformedCheckpoint(f"not a block table dump with {expected}")
    try:
        blocks = _blocks(raw)
        residency = _residency(raw, blocks)
        _check_places(blocks)
        published_at = _ints(raw["published_at"], len(blocks))
        return Loaded(
            blocks=blocks,
            published_at=published_at,
            residency=residency,
            mark=_ints([raw["mark"]], 1)[0],
        )
    except (LookupError, TypeError, ValueError) as error:
        raise MalformedCheckpoint(f"a block table dump with bad columns: {error!r}") from error


def _blocks(raw: Mapping[str, Any]) -> Blocks:
    names, parents, hashes = raw["names"], raw["parents"], raw["hashes"]
    _check_names(names)
    blocks = {name: EngineBlock(name, None) for name in names}
    if len(blocks) != len(names):
        raise ValueError("a name stands twice")
    counts = _ints(raw["counts"], len(blocks))
    for block, parent, count, own in zip(blocks.values(), parents, counts, hashes, strict=True):
        if parent is not None:
            block.link(blocks[parent])
        block.count = count
        if own is not None and (type(own) is not bytes or len(own) % BLOCK_HASH_BYTES):
            raise ValueError("hashes of a block are not whole hashes")
        block.hashes = own
    by_number = list(blocks.values())
    for n, last, tokens, extra_keys in raw["rests"]:
        if not (type(last) is type(tokens) is bytes and len(last) in (0, BLOCK_HASH_BYTES)):
            raise TypeError("the rest of a block is not bytes")
        by_number[n].rest = Rest(BlockHash(last), tokens, tuple(extra_keys))
    return blocks


def _check_places(blocks: Blocks) -> None:
    """Every block hangs from a root; it is placed exactly when its parent is and it is announced.

    Raises:
        ValueError: it is otherwise.
    """
    reached_count = 0
    stack = [block for block in blocks.values() if block.parent is None]
    while stack:
        block = stack.pop()
        reached_count += 1
        parent = block.parent
        is_behind_placed = parent is None or parent.hashes is not None
        if block.hashes is None:
            is_right = block.is_expected if parent is None else block.is_unplaced
            is_right = is_right and (parent is None or not is_behind_placed)
        elif block.rest is None:
            is_right = is_behind_placed and bool(block.hashes)
        else:
            is_right = is_behind_placed and not block.is_unplaced
        if not is_right:
            raise ValueError(f"block {block.key!r} has no place")
        child = block.child
        while child is not None:
            stack.append(child)
            child = child.after
    if reached_count != len(blocks):
        raise ValueError("blocks are their own ancestors")


def _residency(raw: Mapping[str, Any], blocks: Blocks) -> Residency:
    residency = Residency()
    for group in _ints(raw["groups"], None):
        if group in residency.groups or not residency.begin_group(group):
            raise ValueError("bad groups")
    for group in _ints(raw["partial_groups"], None):
        residency.note_partial(group)
    for medium, group, names, counts in raw["places"]:
        _check_names(names)
        if type(medium) is not str or type(group) is not int:
            raise TypeError("a place is no medium and group")
        residency.places[medium, group] = dict(zip(names, _ints(counts, None), strict=True))
    names, doubts = raw["doubted"]
    residency.doubted = dict(zip(names, _ints(doubts, None), strict=True))
    residency.evident = set(raw["evident"])
    residency.withheld = dict.fromkeys(raw["withheld"])
    marked = residency.doubted.keys() | residency.withheld.keys()
    if not (marked <= blocks.keys() and residency.evident <= residency.doubted.keys()):
        raise ValueError("a mark on a block that is not there")
    if blocks and not residency.groups:
        raise ValueError("blocks in no group")
    return residency


def _check_names(names: object) -> None:
    if type(names) is not list or not set(map(type, names)) <= {int, bytes}:
        raise TypeError("names are neither ints nor bytes")


def _ints(values: Any, count: int | None) -> list[int]:
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise TypeError("not a list of ints")
    if (count is not None and len(values) != count) or min(values, default=0) < 0:
        raise ValueError("a column of ints is too short or negative")
    return values
