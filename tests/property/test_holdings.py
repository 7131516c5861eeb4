"""However a history is told again, holdings end as those that missed nothing."""

from hypothesis import given
from hypothesis import strategies as st

from indexer.contract import block_hash
from indexer.engine.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from indexer.table.holdings import Holdings

TOKENS = 4
CAPACITY_BLOCKS = 12


def event(prompt: int, first: int, count: int, kind: str) -> Event:
    """Blocks of one of a few prompts, which are named by what is in them."""
    names = [prompt * 100 + i for i in range(first, first + count)]
    if kind == "clear":
        return AllBlocksCleared()
    if kind == "remove":
        return BlockRemoved(hashes=names[::-1])
    return BlockStored(
        hashes=names,
        parent=prompt * 100 + first - 1 if first else None,
        tokens=block_hash.pack_tokens([name for name in names for _ in range(TOKENS)]),
        block_size_tokens=TOKENS,
    )


EVENTS = st.builds(
    event,
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["store"] * 5 + ["remove"] * 3 + ["clear"]),
)
BATCHES = st.lists(st.lists(EVENTS, max_size=3), min_size=1, max_size=12)


def empty() -> Holdings:
    """Of an engine that has said nothing."""
    return Holdings(model_scope="m", block_size_tokens=TOKENS, capacity_blocks=CAPACITY_BLOCKS)


def followed(batches: list[list[Event]]) -> Holdings:
    """Of somebody who missed nothing."""
    holdings = empty()
    for sequence, events in enumerate(batches):
        holdings.apply(sequence, events)
    return holdings


@given(BATCHES, st.data())
def test_resynchronisation_makes_good_whatever_was_missed(
    batches: list[list[Event]], data: st.DataObject
) -> None:
    """The delta alone makes the published set the true one; nothing in it is superfluous.

    A history that changes nothing is not relied on, and nothing is published.
    """
    missed = data.draw(st.sets(st.integers(0, len(batches) - 1)))
    holdings, truth = empty(), followed(batches)
    for sequence, events in enumerate(batches):
        holdings.apply(sequence, () if sequence in missed else events)
    before = set(holdings.table.published())
    for sequence, events in enumerate(batches):
        holdings.apply_again(sequence, events, is_whole=True)
    delta = holdings.resynchronised()
    expected = set(truth.table.published())
    explains = before != expected
    if not explains:
        expected = set()
    assert (before - set(delta.removed)) | set(delta.added) == expected
    assert set(delta.removed) <= before
    assert not before & set(delta.added)
    assert set(holdings.table.published()) == expected
    assert holdings.sequence == len(batches) - 1
    assert holdings.completeness_ratio() == 1.0 or not explains


@given(BATCHES)
def test_a_history_that_explains_nothing_is_not_relied_on(batches: list[list[Event]]) -> None:
    """Read again without a difference, although reality differs: nothing is claimed any more."""
    holdings = followed(batches)
    before = holdings.table.published()
    for sequence, events in enumerate(batches):
        holdings.apply_again(sequence, events, is_whole=True)
    delta = holdings.resynchronised()
    assert (set(before), []) == (set(delta.removed), list(delta.added))
    assert holdings.table.published() == []


@given(BATCHES)
def test_a_history_with_an_unreadable_batch_claims_nothing_of_before(
    batches: list[list[Event]],
) -> None:
    """What came before that batch may be gone; what came after it is known."""
    holdings = empty()
    for sequence, events in enumerate(batches):
        holdings.apply_again(sequence, events, is_whole=True)
    holdings.apply_again(len(batches), (), is_whole=False)
    holdings.resynchronised()
    assert holdings.table.published() == []


@given(BATCHES, BATCHES)
def test_saved_holdings_go_on_as_if_nothing_was(
    before: list[list[Event]], after: list[list[Event]]
) -> None:
    """Load what was saved, apply what came since: the same as having stayed."""
    holdings = followed(before)
    saved = holdings.save()
    assert saved is not None
    again = empty().load(saved)
    assert set(again.table.published()) == set(holdings.table.published())
    for sequence, events in enumerate(after, len(before)):
        holdings.apply(sequence, events)
        again.apply(sequence, events)
    assert set(again.table.published()) == set(holdings.table.published())
    assert again.sequence == holdings.sequence


@given(BATCHES, BATCHES, st.integers(0, 2))
def test_completeness_falls_and_comes_back(
    before: list[list[Event]], after: list[list[Event]], lost: int
) -> None:
    """1 until a loss, never above 1, 1 again after a clear or a capacity's worth of stores."""
    holdings = followed(before)
    assert holdings.completeness_ratio() == 1.0
    holdings.lose()
    assert 0.0 <= holdings.completeness_ratio() < 1.0
    saved = holdings.save()
    assert saved is not None
    assert empty().load(saved).completeness_ratio() == holdings.completeness_ratio()
    first = len(before) + lost
    for sequence, events in enumerate(after, first):
        holdings.apply(sequence, events)
        assert 0.0 <= holdings.completeness_ratio() <= 1.0
    full = [event(9, 0, CAPACITY_BLOCKS, "store")]
    holdings.apply(first + len(after), full)
    assert holdings.completeness_ratio() == 1.0
