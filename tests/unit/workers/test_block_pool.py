"""Copies of the same content in the block pool."""

import pytest

from workers.simulated.block_pool import BlockPool

HASH = 77


def make_pool() -> tuple[BlockPool, int, int]:
    """A pool of three blocks, two of which hold the same content and are in use."""
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.store([first], [HASH])
    pool.store([second], [HASH])
    return pool, first, second


def test_first_copy_is_the_one_that_is_hit() -> None:
    """As in vLLM, a hit gets the block stored first."""
    pool, first, _ = make_pool()
    assert pool.match([HASH], 1) == [first]


@pytest.mark.parametrize("evicted", [0, 1])
def test_other_copy_is_hit_after_one_is_evicted(evicted: int) -> None:
    """Whichever copy goes, the content stays resident in the other."""
    pool, *copies = make_pool()
    pool.release([copies[evicted]])
    pool.allocate(2)  # the empty block, then the released one
    assert pool.match([HASH], 1) == [copies[1 - evicted]]


def test_content_is_gone_with_its_last_copy() -> None:
    """Both evicted: two removals of one hash, and no hit."""
    pool, first, second = make_pool()
    pool.release([first, second])
    pool.allocate(3)
    removed = [h for event in pool.events for h in getattr(event, "block_hashes", ())]
    assert (pool.match([HASH], 1), removed) == ([], [HASH, HASH])


def test_match_ends_at_the_first_hole() -> None:
    """Only leading resident blocks count."""
    pool, first, _ = make_pool()
    assert pool.match([HASH, 1, HASH], 3) == [first]


def test_copies_take_over_in_the_order_they_were_stored() -> None:
    """With the third and the first of three copies gone, the second is hit."""
    pool, first, second = make_pool()
    (third,) = pool.allocate(1)
    pool.store([third], [HASH])
    for block_id in (third, first):
        pool.release([block_id])
        pool.allocate(1)
    assert pool.match([HASH], 1) == [second]


def test_a_block_that_was_not_full_goes_before_all_others() -> None:
    """As in vLLM, content is evicted only when no empty block is left."""
    pool = BlockPool(3)
    old, new, partial = pool.allocate(3)
    pool.store([old], [1])
    pool.store([new], [2])
    pool.release([old])
    pool.release([new, partial])
    assert pool.allocate(1) == [partial]
    assert (pool.events, pool.match([1], 1)) == ([], [old])
