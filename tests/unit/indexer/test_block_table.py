"""Laws of the block table that deserve a name of their own."""

from collections.abc import Sequence
from typing import Any

import pytest

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.engine.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.table import block_tree
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta

TOKENS = list(range(100, 164))


def chain(tokens: Sequence[int] = TOKENS, *, size: int = 16, **root: str) -> list[BlockHash]:
    """Canonical hashes as the router computes them."""
    start = block_hash.root(model_scope="m", block_size_tokens=size, **root)
    return block_hash.split(block_hash.chain(start, block_hash.pack_tokens(tokens), size))


def store(
    hashes: Sequence[int], tokens: Sequence[int] = TOKENS, parent: int | None = None, **more: Any
) -> BlockStored:
    """A store of these blocks; their size follows from the number of tokens."""
    return BlockStored(
        hashes=list(hashes),
        parent=parent,
        tokens=block_hash.pack_tokens(tokens),
        block_size_tokens=len(tokens) // len(hashes),
        **more,
    )


def remove(*hashes: int, **more: Any) -> BlockRemoved:
    """A removal of these blocks."""
    return BlockRemoved(hashes=hashes, **more)


def table(size: int = 16) -> BlockTable:
    """An empty table."""
    return BlockTable(model_scope="m", block_size_tokens=size)


def test_a_prefill_is_the_routers_chain() -> None:
    """What is added are the hashes a router computes for the same tokens, in their order."""
    assert Delta(added=chain(), removed=[]) == table().apply(store([1, 2, 3, 4]))


def test_removal_takes_descendants_back_children_first() -> None:
    """A hole ends the prefix of everything behind it."""
    t, c = table(), chain()
    t.apply(store([1, 2, 3, 4]))
    assert Delta(removed=[c[3], c[2], c[1]], added=[]) == t.apply(remove(2))


def test_a_filled_hole_republishes_what_waited() -> None:
    """Resident descendants come back with the hole."""
    t, c = table(), chain()
    t.apply(store([1, 2, 3, 4]))
    t.apply(remove(2))
    assert Delta(removed=[], added=c[1:]) == t.apply(store([2], TOKENS[16:32], parent=1))


def test_stores_are_counted() -> None:
    """A block stored twice is gone only when it was removed twice."""
    t = table()
    t.apply(store([1], TOKENS[:16]))
    t.apply(store([1], TOKENS[:16]))
    assert Delta() == t.apply(remove(1))
    assert Delta(removed=chain()[:1], added=[]) == t.apply(remove(1))
    assert len(t) == 0


def test_unknown_parent_waits() -> None:
    """A chain without its beginning is credited once the beginning is known."""
    t, c = table(), chain()
    assert Delta() == t.apply(store([3, 4], TOKENS[32:], parent=2))
    assert (t.unknown_parents_count, t.unplaced_count) == (1, 2)
    assert Delta(removed=[], added=c) == t.apply(store([1, 2], TOKENS[:32]))
    assert t.unplaced_count == 0


def test_waiting_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a chain without its beginning is refused, and counted."""
    monkeypatch.setattr(block_tree, "UNPLACED_BLOCKS_MAX", 2)
    t = table()
    t.apply(store([3, 4], TOKENS[32:], parent=2))
    t.apply(store([5], TOKENS[:16], parent=4))
    assert (t.unplaced_count, t.refused_count) == (2, 1)


def test_a_full_table_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a bound, whatever an engine announces."""
    monkeypatch.setattr(block_tree, "BLOCKS_MAX", 4)
    t = table()
    assert Delta() == t.apply(store([1, 2, 3, 4]))
    assert t.refused_count == 4


def test_larger_engine_blocks_credit_all_they_hold() -> None:
    """One engine block of 32 tokens is two canonical ones of 16."""
    t, c = table(), chain()
    assert Delta(removed=[], added=c) == t.apply(store([1, 2]))
    assert Delta(removed=[c[3], c[2]], added=[]) == t.apply(remove(2))


def test_smaller_engine_blocks_credit_when_the_last_is_there() -> None:
    """Two engine blocks of 16 tokens make one canonical one of 32."""
    t, c = table(32), chain(size=32)
    assert Delta() == t.apply(store([1], TOKENS[:16]))
    assert Delta(removed=[], added=c[:1]) == t.apply(store([2], TOKENS[16:32], parent=1))
    assert Delta(removed=c[:1], added=[]) == t.apply(remove(1))


def test_adapter_and_salt_are_roots_of_their_own() -> None:
    """Equal tokens under another adapter or salt are other blocks."""
    expected = chain(adapter="ada", salt="s")
    assert expected == table().apply(store([1, 2, 3, 4], adapter="ada", salt="s")).added


def test_extra_keys_change_a_block_and_what_follows() -> None:
    """A multimodal input makes its block, and all behind it, another prefix."""
    added = table().apply(store([1, 2, 3, 4], extra_keys=[(), (["image", 0],), (), ()])).added
    c = chain()
    packed = block_hash.pack_tokens(TOKENS)
    extra = block_hash.encode_extra_keys([["image", 0]])
    second = block_hash.step(c[0], packed[64:128], extra)
    assert [c[0], second, block_hash.step(second, packed[128:192])] == added[:3]


def test_extra_keys_reach_every_canonical_block_they_touch() -> None:
    """Whatever the sizes, a canonical block takes the keys of all engine blocks it touches."""
    packed = block_hash.pack_tokens(TOKENS)
    root = block_hash.root(model_scope="m", block_size_tokens=32)
    extra = block_hash.encode_extra_keys([["image", 0]])
    marked = block_hash.step(root, packed[:128], extra)
    expected = [marked, block_hash.step(marked, packed[128:])]
    keys = ["image", 0]
    for extra_keys in ([(), (keys,), (), ()], [(keys,), (), (), ()]):
        assert expected == table(32).apply(store([1, 2, 3, 4], extra_keys=extra_keys)).added
    both = [marked, block_hash.step(marked, packed[128:], extra)]
    assert both == table(32).apply(store([1], extra_keys=[(keys,)])).added


def test_blocks_of_different_sizes_in_one_chain() -> None:
    """A canonical block that begins within an engine block does not take the keys before it."""
    t = table()
    packed = block_hash.pack_tokens(TOKENS)
    t.apply(store([1], TOKENS[:8], extra_keys=[("mark",)]))
    root = block_hash.root(model_scope="m", block_size_tokens=16)
    first = block_hash.step(root, packed[:64], block_hash.encode_extra_keys(["mark"]))
    expected = [first, block_hash.step(first, packed[64:128])]
    assert expected == t.apply(store([2], TOKENS[8:32], parent=1)).added


def test_other_media_credit_nothing() -> None:
    """A copy in host memory is neither a device block nor does its removal end one."""
    t = table()
    assert Delta() == t.apply(store([1], TOKENS[:16], medium="CPU"))
    t.apply(store([1], TOKENS[:16]))
    assert Delta() == t.apply(remove(1, medium="CPU"))


def test_every_deciding_group_has_to_hold_a_block() -> None:
    """With several deciding groups the usable depth is the least of theirs."""
    t, c = table(), chain()
    t.apply(store([1, 2], TOKENS[:32]))
    withdrawn = t.apply(store([1], TOKENS[:16], group=1))
    assert Delta(removed=[c[1], c[0]], added=[c[0]]) == withdrawn
    assert Delta(removed=[], added=[c[1]]) == t.apply(store([2], TOKENS[16:32], 1, group=1))
    assert Delta(removed=[c[1]], added=[]) == t.apply(remove(2, group=1))


def test_partial_groups_do_not_decide() -> None:
    """What a sliding window drops ends no hit."""
    t = table()
    t.apply(store([1], TOKENS[:16]))
    t.apply(store([1], TOKENS[:16], group=1, decides=False))
    assert Delta() == t.apply(remove(1, group=1))


def test_equal_content_under_two_names_is_held_twice() -> None:
    """A canonical block goes when the last engine block that holds it goes."""
    t = table()
    t.apply(store([1], TOKENS[:16]))
    assert Delta() == t.apply(store([2], TOKENS[:16]))
    assert Delta() == t.apply(remove(1))
    assert Delta(removed=chain()[:1], added=[]) == t.apply(remove(2))


def test_cleared() -> None:
    """AllBlocksCleared takes everything back, children first, and leaves nothing."""
    t = table()
    t.apply(store([1, 2, 3, 4]))
    t.apply(store([9], TOKENS[:16], parent=8))
    assert Delta(removed=chain()[::-1], added=[]) == t.apply(AllBlocksCleared())
    assert (len(t), t.published_count, t.unplaced_count) == (0, 0, 0)


def test_stores_without_tokens_are_refused() -> None:
    """A device block of unknown content cannot be credited."""
    t = table()
    t.apply(BlockStored(hashes=[1], parent=None, tokens=b"", block_size_tokens=16))
    assert (len(t), t.refused_count) == (0, 1)


def test_a_block_above_itself_is_refused() -> None:
    """Nonsense about parents ends in a refusal, not in a loop."""
    t = table()
    t.apply(store([1], TOKENS[:16], parent=2))
    assert Delta() == t.apply(store([2], TOKENS[16:32], parent=1))
    assert Delta() == t.apply(store([3], TOKENS[16:32], parent=3))
    assert t.published_count == 0
    assert t.refused_count == 2


def test_removal_of_the_unknown_is_counted() -> None:
    """Removals of blocks never seen change nothing."""
    t = table()
    assert Delta() == t.apply(remove(7))
    assert t.unknown_removals_count == 1
