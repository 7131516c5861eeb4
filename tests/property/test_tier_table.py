"""Laws of what a sidecar says of a tier."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from indexer.contract import block_hash
from indexer.engine.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from indexer.table.block_table import BlockTable
from indexer.table.changes import Delta
from indexer.table.holdings import Holdings
from indexer.table.tier_table import TierTable

SIZE = 4
SCOPE = {"model_scope": "m", "block_size_tokens": SIZE}
CHAINS = ((1, 2, 3, 4), (1, 2, 5, 6, 7), (8, 9), (8, 10, 11))
"""Blocks by the engine's names; equal beginnings are equal prompts."""

chains = st.sampled_from(CHAINS)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), chains, st.integers(1, 5)),
        st.tuples(st.just("drop"), chains, st.integers(1, 5)),
        st.tuples(st.just("lose"), chains, st.just(1)),
        st.tuples(st.just("clear"), chains, st.just(1)),
    ),
    max_size=25,
)


def tokens_of(keys: Sequence[int]) -> bytes:
    """A block's tokens follow from its name."""
    return block_hash.pack_tokens([key for key in keys for _ in range(SIZE)])


def store(keys: Sequence[int], medium: str, *, told: bool = True) -> BlockStored:
    """A chain from its first block on."""
    tokens = tokens_of(keys) if told else b""
    return BlockStored(
        hashes=list(keys), parent=None, tokens=tokens, block_size_tokens=SIZE, medium=medium
    )


def names_of(keys: Sequence[int]) -> list[bytes]:
    """Under which the tier's blocks of a chain are published."""
    chain = block_hash.chain(block_hash.root(**SCOPE), tokens_of(keys), SIZE)
    return list(block_hash.split(block_hash.tier_chain(chain)))


def device_with_everything() -> BlockTable:
    """It knows every block by name."""
    table = BlockTable(**SCOPE)
    for chain in CHAINS:
        table.apply(store(chain, "GPU"))
    return table


class Index:
    """What is published after all deltas."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def take(self, deltas: Sequence[Delta]) -> None:
        """Only what is there goes, only what is not comes."""
        for delta in deltas:
            assert self.held.issuperset(delta.removed)
            self.held.difference_update(delta.removed)
            assert self.held.isdisjoint(delta.added)
            self.held.update(delta.added)
            self.check_closed()

    def check_closed(self) -> None:
        """Whoever holds a block holds all before it."""
        for chain in CHAINS:
            flags = [name in self.held for name in names_of(chain)]
            assert flags == sorted(flags, reverse=True)


def event_of(action: str, keys: Sequence[int], *, told: bool) -> Event:
    """What the engine says."""
    if action == "clear":
        return AllBlocksCleared()
    if action == "drop":
        return BlockRemoved(hashes=list(keys)[-1:], medium="CPU")
    return store(keys, "CPU", told=told)


@given(actions, st.sampled_from([3, 8, 1000]))
def test_a_store_without_tokens_is_one_with_them(
    acts: list[tuple[str, tuple[int, ...], int]], blocks_max: int
) -> None:
    """Where the device knows the blocks. At every step the tier is prefix-closed and bounded."""
    device = device_with_everything()
    tiers = [TierTable(**SCOPE, media=["CPU"], blocks_max=blocks_max) for _ in range(2)]
    indexes = [Index(), Index()]
    for action, chain, count in acts:
        for told, tier, index in zip((True, False), tiers, indexes, strict=True):
            if action == "lose":
                index.take([tier.doubt()])
            else:
                index.take(tier.hear(event_of(action, chain[:count], told=told), device))
            assert index.held == set(tier.published())
            assert len(tier) == len(index.held) <= blocks_max
        assert indexes[0].held == indexes[1].held


def test_what_was_written_last_is_kept_when_there_is_too_much() -> None:
    """Six blocks hold a chain of three and the head of the older one; memory goes with its tail."""
    device = device_with_everything()
    tier = TierTable(**SCOPE, media=["CPU"], blocks_max=6)
    tier.hear(store(CHAINS[0], "CPU"), device)
    tier.hear(store(CHAINS[3], "CPU"), device)
    assert set(tier.published()) == {*names_of(CHAINS[0][:3]), *names_of(CHAINS[3])}
    assert (tier.forgotten_count, len(tier._table)) == (1, 6)


def test_blocks_that_nobody_knows_and_other_media_are_left_out() -> None:
    """Without tokens and unknown to the device: refused; of another medium: not looked at."""
    tier = TierTable(**SCOPE, media=["CPU"])
    device = BlockTable(**SCOPE)
    tier.hear(store([1, 2], "CPU", told=False), device)
    tier.hear(store([1, 2], "STORAGE"), device)
    assert (len(tier), tier.refused_count) == (0, 2)


def test_names_of_the_tier_are_no_names_of_the_device_and_go_by_chain_or_one_by_one() -> None:
    """Both ways give the same; twice gives the block's own name back."""
    chain = block_hash.chain(block_hash.root(**SCOPE), tokens_of([1, 2, 3]), SIZE)
    own = block_hash.split(chain)
    named = block_hash.split(block_hash.tier_chain(chain))
    assert named == [block_hash.tier_name(block) for block in own]
    assert not set(named) & set(own)
    assert block_hash.tier_chain(block_hash.tier_chain(chain)) == chain


@given(actions, st.booleans())
def test_history_read_again_leaves_what_it_tells(
    acts: list[tuple[str, tuple[int, ...], int]], is_known: bool
) -> None:
    """Of device and tier: the difference brings the index there, whatever it held before."""
    held = Holdings(
        **SCOPE, capacity_blocks=None, make_tier=lambda: TierTable(**SCOPE, media=["CPU"])
    )
    index = Index()
    events: list[Event] = [store(chain, "GPU") for chain in CHAINS]
    events += [event_of(act, chain[:n], told=True) for act, chain, n in acts if act != "lose"]
    if is_known:
        index.take(held.apply(0, events))
    events.append(store(CHAINS[1], "GPU"))
    events.append(store(CHAINS[1], "CPU"))
    held.apply_again(1, events, is_whole=True)
    index.take([held.resynchronised()])
    assert index.held == set(held.published())
    if index.held:  # else nothing had changed, and everything is doubted
        assert index.held.issuperset(names_of(CHAINS[1]))
    index.take([held.clear()])
    assert index.held == set(held.published()) == set()
