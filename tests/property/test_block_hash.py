"""Laws of the canonical block hash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.contract import block_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
SIZES = st.sampled_from([8, 16, 32])
ROOT = block_hash.root(model_scope="m", block_size_tokens=16)


def chain(tokens: list[int], size: int) -> list[bytes]:
    """Hashes of a prompt under ROOT."""
    return block_hash.split(block_hash.chain(ROOT, block_hash.pack_tokens(tokens), size))


@given(tokens=TOKENS, size=SIZES)
def test_only_full_blocks_have_a_hash(tokens: list[int], size: int) -> None:
    """A partial last block does not exist."""
    assert len(chain(tokens, size)) == len(tokens) // size


@given(tokens=TOKENS, size=SIZES, data=st.data())
def test_the_hash_of_a_prefix_is_the_prefix_of_the_hashes(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    """What a longer prompt shares with a shorter one, it shares in hashes."""
    cut = data.draw(st.integers(0, len(tokens)))
    assert chain(tokens[:cut], size) == chain(tokens, size)[: cut // size]


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=200), size=SIZES, data=st.data()
)
def test_a_changed_token_changes_every_hash_from_its_block_on(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    """An equal hash means an equal whole prefix."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = tokens.copy()
    other[at] ^= 1
    before, after = chain(tokens, size), chain(other, size)
    assert before[: at // size] == after[: at // size]
    assert not set(before[at // size :]) & set(after[at // size :])


@given(
    left=st.tuples(st.text(), st.none() | st.text(), st.none() | st.text(), SIZES),
    right=st.tuples(st.text(), st.none() | st.text(), st.none() | st.text(), SIZES),
)
def test_roots_differ_when_anything_differs(left: tuple, right: tuple) -> None:
    """Scope, adapter, salt and block size each make a cache of its own; absent is not empty."""

    def root(parts: tuple) -> bytes:
        scope, adapter, salt, size = parts
        return block_hash.root(
            model_scope=scope, adapter=adapter, salt=salt, block_size_tokens=size
        )

    assert (left == right) == (root(left) == root(right))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_outside_32_bits_is_refused(token: int) -> None:
    """It could only collide."""
    with pytest.raises(OverflowError):
        block_hash.pack_tokens([token])


def test_golden_vectors() -> None:
    """Stored indexes and other versions rely on these very bytes."""
    root = block_hash.root(model_scope="m", block_size_tokens=4)
    hashes = block_hash.chain(root, block_hash.pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9]), 4)
    salted = block_hash.root(model_scope="m", block_size_tokens=4, adapter="a", salt="s")
    assert (root.hex(), hashes.hex(), salted.hex()) == GOLDEN


GOLDEN = (
    "5ef4ab74e0e586e9",
    "38110e64e527c585fc2e9c4585a22120",
    "237dabb99696465f",
)
