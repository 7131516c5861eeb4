"""Laws of the blocks that are learned from routers, under any notices."""

from hypothesis import given
from hypothesis import strategies as st

from indexer.approximate.learned_blocks import LearnedBlocks
from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash
from indexer.table.changes import Delta

ROOT = block_hash.root(model_scope="m", block_size_tokens=16)


def chain(path: list[int]) -> list[BlockHash]:
    """Hashes of blocks, each of one repeated token: equal beginnings are equal prefixes."""
    packed = block_hash.pack_tokens([token for token in path for _ in range(16)])
    return block_hash.split(block_hash.chain(ROOT, packed, 16))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), paths, st.integers(0, 6)),
        st.tuples(st.just("trim"), st.integers(0, 8)),
        st.tuples(st.just("expire"), st.integers(0, 12)),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


class Index:
    """What Redis would hold, with every parent that was ever told."""

    def __init__(self) -> None:
        self.blocks: list[BlockHash] = []
        self.parent: dict[BlockHash, BlockHash | None] = {}

    def take(self, delta: Delta) -> None:
        """Apply a delta block by block; the published set is prefix-closed after each."""
        for block in delta.removed:
            self.blocks.remove(block)
            assert all(self.parent[other] != block for other in self.blocks)
        for block in delta.added:
            assert block not in self.blocks
            assert self.parent[block] is None or self.parent[block] in self.blocks
            self.blocks.append(block)


@given(blocks_max=st.integers(0, 8), history=steps)
def test_the_published_blocks_are_bounded_and_prefix_closed(blocks_max: int, history: list) -> None:
    """After every step, and within it; and the deltas add up to what is published."""
    learned, index, computed = LearnedBlocks(blocks_max), Index(), 0
    for kind, *arguments in history:
        match kind:
            case "learn":
                path, first = arguments
                hashes = chain(path)
                for before, block in zip([None, *hashes], hashes, strict=False):
                    index.parent[block] = before
                first = min(first, len(hashes) - 1)
                delta = learned.learn(hashes[first:], first_block=first, computed_blocks=computed)
            case "trim":
                delta = learned.trim(arguments[0])
            case "expire":
                computed += arguments[0]
                delta = learned.expire(computed)
            case _:
                delta = learned.clear()
        index.take(delta)
        assert sorted(index.blocks) == sorted(learned.published())
        assert len(learned) <= blocks_max
        placed = learned.published()
        assert all(
            index.parent[block] is None or index.parent[block] in placed[:at]
            for at, block in enumerate(placed)
        )


@given(st.lists(paths, min_size=1, max_size=12))
def test_the_last_chain_stays_whole_when_others_give_way(told: list[list[int]]) -> None:
    """What was used last is forgotten last, as in an engine."""
    learned = LearnedBlocks(6)
    for path in told:
        learned.learn(chain(path))
    assert all(block in learned for block in chain(told[-1]))


def test_a_chain_is_forgotten_when_the_kv_cache_was_filled_with_other_things() -> None:
    """Using it keeps it; so does using what is behind it."""
    learned = LearnedBlocks(10)
    learned.learn(chain([0, 0]), computed_blocks=0)
    learned.learn(chain([1, 1]), computed_blocks=4)
    used = chain([0, 0, 0])
    learned.learn(used[1:], first_block=1, computed_blocks=5)
    assert learned.expire(13).removed == ()
    assert learned.expire(14).removed == list(reversed(chain([1, 1])))
    assert learned.published() == used
    assert learned.expire(15).removed == list(reversed(used))


def test_an_end_whose_beginning_was_forgotten_is_not_learned() -> None:
    """Nobody could find it, and the beginning may be gone from the engine too."""
    learned = LearnedBlocks(10)
    hashes = chain([0, 1, 2])
    assert learned.learn(hashes[1:], first_block=1).added == ()
    assert (learned.unanchored_count, len(learned)) == (1, 0)
    learned.learn(hashes[:2])
    assert learned.learn(hashes[1:], first_block=1).added == hashes[2:]


def test_a_chain_that_contradicts_itself_is_learned_up_to_there() -> None:
    """Any router of any version may have told it; nothing hangs, and no block is without parent."""
    learned = LearnedBlocks(10)
    a, b = chain([0, 1])
    learned.learn([a, b, a, b])
    learned.learn([b, a], first_block=1)
    learned.learn([b])
    assert learned.published() == [a, b]


def test_a_text_chain_has_another_root_than_any_token_chain() -> None:
    """Under every scope, adapter and salt alike."""
    scopes = [(m, a, s) for m in ("m", "text") for a in (None, "m") for s in (None, "m")]
    roots = [
        make(model_scope=m, block_size_tokens=16, adapter=a, salt=s)
        for make in (block_hash.root, block_hash.approximate_root)
        for m, a, s in scopes
    ]
    assert len(set(roots)) == 2 * len(scopes)
