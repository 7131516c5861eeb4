"""Laws of workloads: sorting by spilling, blocks of text and pieces, pacing, rescaling."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadgen.trace import TraceRow
from loadgen.workloads.blocks import piece_blocks, text_blocks, text_tokens
from loadgen.workloads.ordering import by_arrival
from loadgen.workloads.pacing import Pacer, plan, rescale


@st.composite
def session_rows(draw: st.DrawFn) -> list[TraceRow]:
    """Rows of a few sessions, by arrival."""
    arrivals = sorted(draw(st.lists(st.integers(0, 50), min_size=2, max_size=12)))
    return [
        TraceRow(
            arrival_s=float(arrival),
            prompt_tokens=4,
            output_tokens=draw(st.integers(1, 9)),
            block_ids=(place,),
            block_size_tokens=4,
            session_id=draw(st.sampled_from("abcd")),
        )
        for place, arrival in enumerate(arrivals)
    ]


@given(rows=st.lists(session_rows(), max_size=3), held=st.integers(1, 200))
def test_spilling_sorts_as_memory_does(rows: list[list[TraceRow]], held: int) -> None:
    """However little is held, the order is that of a stable sort and no row changes."""
    flat = [row for part in rows for row in part]
    expected = sorted(flat, key=lambda row: row.arrival_s)
    assert expected == list(by_arrival(flat, held_ids_max=held))


@given(
    shared=st.text(min_size=1),
    endings=st.tuples(st.text(), st.text()),
    chars_per_token=st.floats(0.5, 6),
    size=st.integers(1, 8),
)
def test_texts_share_the_blocks_of_their_common_beginning(
    shared: str, endings: tuple[str, str], chars_per_token: float, size: int
) -> None:
    """Blocks wholly in the shared text have one id; there are as many as the length asks."""
    ids = [
        text_blocks(shared + end, chars_per_token=chars_per_token, block_size_tokens=size)
        for end in endings
    ]
    common = int(len(shared) / (size * chars_per_token))
    common = max(0, common - 1) if common * size * chars_per_token > len(shared) else common
    assert ids[0][:common] == ids[1][:common]
    for blocks, end in zip(ids, endings, strict=True):
        assert len(blocks) == -(-text_tokens(shared + end, chars_per_token) // size)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=6),
    others=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=6),
    size=st.integers(1, 5),
)
def test_pieces_share_blocks_exactly_where_their_tokens_are_equal(
    pieces: list[tuple[int, int]], others: list[tuple[int, int]], size: int
) -> None:
    """Block n is shared if and only if all tokens up to its end are."""
    # A component has one length; the drawn ones are made so.
    length = {piece: 1 + piece // 2 for piece in range(4)}
    rows = [[(piece, length[piece]) for piece, _ in part] for part in (pieces, others)]
    tokens = [[(p, i) for p, count in row for i in range(count)] for row in rows]
    ids = [piece_blocks(row, size) for row in rows]
    assert [-(-len(each) // size) for each in tokens] == [len(each) for each in ids]
    for block in range(min(map(len, ids))):
        end = (block + 1) * size
        same = tokens[0][:end] == tokens[1][:end]
        assert same == (ids[0][block] == ids[1][block])


@given(rows=session_rows(), answer_s=st.floats(0, 20))
def test_closed_loop_sends_every_row_once_and_none_before_its_parents_answer(
    rows: list[TraceRow], answer_s: float
) -> None:
    """Driven to its end, each row goes out a think time after its parent's answer."""
    steps = plan(rows, "closed_loop")
    pacer = Pacer(steps)
    sent_s: dict[int, float] = {}
    while (now_s := pacer.next_due_s) is not None:
        for index in pacer.take(now_s):
            sent_s[index] = now_s
            pacer.answered(index, now_s + answer_s)
    assert ([*range(len(rows))], 0) == (sorted(sent_s), pacer.left_count)
    for index, step in enumerate(steps):
        base = 0.0 if step.parent is None else sent_s[step.parent] + answer_s
        assert sent_s[index] == base + step.after_s


@given(rows=session_rows(), rate=st.floats(0.01, 100))
def test_rescaling_keeps_gaps_within_sessions_and_sets_the_rate_of_starts(
    rows: list[TraceRow], rate: float
) -> None:
    """Sessions begin at request_rate / requests per session."""
    starts = {row.session_id: row.arrival_s for row in reversed(rows)}
    if len(set(starts.values())) < 2:
        return
    moved = rescale(rows, request_rate=rate)
    for session in starts:
        before = [row.arrival_s for row in rows if row.session_id == session]
        after = [row.arrival_s for row in moved if row.session_id == session]
        for (a, b), (c, d) in zip(pairwise(before), pairwise(after), strict=True):
            assert abs((b - a) - (d - c)) < 1e-5
    begun = sorted({row.session_id: row.arrival_s for row in reversed(moved)}.values())
    expected = (len(starts) - 1) / (rate * len(starts) / len(rows))
    assert abs(begun[-1] - begun[0] - expected) < 1e-5 * (1 + expected)
