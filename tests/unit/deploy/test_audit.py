"""The audit of predictions reports what no block event explains."""

import json
from dataclasses import replace

import pytest

from deploy.demo.audit import Journal, ServedRequest, Verdict, audit, judge
from indexer.contract import block_hash

BLOCK = 16
ROOT = block_hash.root(model_scope="sim", block_size_tokens=BLOCK)
PROMPT = tuple(range(100, 100 + 5 * BLOCK + 3))
CHAIN = block_hash.split(block_hash.chain(ROOT, block_hash.pack_tokens(PROMPT), BLOCK))
DECIDED_S = 1000.0
FIRST_TOKEN_S = 1002.0


def make_request(*, predicted_blocks: int, actual_blocks: int) -> ServedRequest:
    """Build a request on instance a that hits whole blocks."""
    return ServedRequest(
        request_id="r",
        instance_id="a",
        decided_s=DECIDED_S,
        first_token_s=FIRST_TOKEN_S,
        prompt=PROMPT,
        predicted_tokens=predicted_blocks * BLOCK,
        actual_tokens=actual_blocks * BLOCK,
    )


def line(
    *,
    added: tuple[int, ...] = (),
    removed: tuple[int, ...] = (),
    at_s: float = 1001.0,
    engine_s: float | None = None,
    instance_id: str = "a",
) -> str:
    """Build a journal line that changes blocks of the prompt's chain, given by their number."""
    return json.dumps(
        {
            "published_s": at_s,
            "instance_id": instance_id,
            "engine_ts_s": at_s if engine_s is None else engine_s,
            "added": [CHAIN[number].hex() for number in added],
            "removed": [CHAIN[number].hex() for number in removed],
        }
    )


@pytest.mark.parametrize(
    ("actual_blocks", "expected"), [(1, Verdict.EXPLAINED), (0, Verdict.UNEXPLAINED)]
)
def test_a_request_in_flight_that_came_later_explains_its_own_blocks_only(
    actual_blocks: int, expected: Verdict
) -> None:
    """What the index promised is not excused by it."""
    request = replace(
        make_request(predicted_blocks=3, actual_blocks=actual_blocks), in_flight_tokens=2 * BLOCK
    )
    assert judge(request, Journal.parse([]), root=ROOT, block_size_tokens=BLOCK) is expected


@pytest.mark.parametrize(
    ("predicted_blocks", "actual_blocks", "lines", "expected"),
    [
        pytest.param(3, 3, [], Verdict.EXACT, id="as predicted"),
        pytest.param(1, 3, [line(added=(1, 2))], Verdict.EXPLAINED, id="stored in between"),
        pytest.param(
            1,
            3,
            [line(added=(1,)), line(added=(2,), at_s=1001.5)],
            Verdict.EXPLAINED,
            id="stored in two steps",
        ),
        pytest.param(1, 3, [line(added=(1,))], Verdict.UNEXPLAINED, id="one block unaccounted for"),
        pytest.param(
            1, 2, [line(added=(1,), at_s=999.0)], Verdict.UNEXPLAINED, id="known when deciding"
        ),
        pytest.param(
            1,
            2,
            [line(added=(1,), at_s=1003.0)],
            Verdict.UNEXPLAINED,
            id="stored after the first token",
        ),
        pytest.param(
            1,
            2,
            [line(added=(1,), at_s=1003.0, engine_s=1001.0)],
            Verdict.EXPLAINED,
            id="stored in between, published late",
        ),
        pytest.param(
            1,
            2,
            [line(added=(1,), instance_id="b")],
            Verdict.UNEXPLAINED,
            id="stored on another instance",
        ),
        pytest.param(
            1, 2, [line(removed=(1,))], Verdict.UNEXPLAINED, id="a removal explains no extra hit"
        ),
        pytest.param(4, 1, [line(removed=(3, 2))], Verdict.EXPLAINED, id="evicted in between"),
        pytest.param(4, 1, [line(removed=(4,))], Verdict.UNEXPLAINED, id="another block evicted"),
        pytest.param(
            4,
            1,
            [line(removed=(2,), at_s=999.0)],
            Verdict.UNEXPLAINED,
            id="evicted before deciding",
        ),
        pytest.param(
            4, 1, [line(added=(2,))], Verdict.UNEXPLAINED, id="a store explains no missing hit"
        ),
        pytest.param(0, 6, [line(added=(0, 1, 2, 3, 4))], Verdict.UNEXPLAINED, id="beyond prompt"),
    ],
)
def test_only_events_between_decision_and_first_token_explain_a_difference(
    predicted_blocks: int, actual_blocks: int, lines: list[str], expected: Verdict
) -> None:
    """A difference needs the very blocks changing on the very instance in the very window."""
    request = make_request(predicted_blocks=predicted_blocks, actual_blocks=actual_blocks)
    journal = Journal.parse(lines)
    assert expected == judge(request, journal, root=ROOT, block_size_tokens=BLOCK)


def test_a_difference_smaller_than_a_block_is_unexplained() -> None:
    """Hits come in whole blocks, so nothing explains a few tokens."""
    request = ServedRequest(
        request_id="r",
        instance_id="a",
        decided_s=DECIDED_S,
        first_token_s=FIRST_TOKEN_S,
        prompt=PROMPT,
        predicted_tokens=BLOCK,
        actual_tokens=BLOCK + 1,
    )
    journal = Journal.parse([])
    expected = Verdict.UNEXPLAINED
    assert expected == judge(request, journal, root=ROOT, block_size_tokens=BLOCK)


def test_shares_are_of_all_requests() -> None:
    """Two exact, one explained, one planted unexplained of four."""
    planted = make_request(predicted_blocks=0, actual_blocks=2)
    requests = [
        make_request(predicted_blocks=2, actual_blocks=2),
        make_request(predicted_blocks=0, actual_blocks=0),
        make_request(predicted_blocks=4, actual_blocks=2),
        planted,
    ]
    journal = Journal.parse([line(removed=(2, 3))])
    result = audit(requests, journal, root=ROOT, block_size_tokens=BLOCK)
    assert (0.5, 0.25, (planted,)) == (
        result.predicted_exactly_share,
        result.mismatch_unexplained_share,
        result.unexplained,
    )


def test_without_an_engine_time_the_time_of_publishing_counts() -> None:
    """A sidecar that cannot date a change dates it no earlier than it published it."""
    entry = json.loads(line(added=(1,), at_s=FIRST_TOKEN_S + 1)) | {"engine_ts_s": None}
    request = make_request(predicted_blocks=1, actual_blocks=2)
    journal = Journal.parse([json.dumps(entry)])
    expected = Verdict.UNEXPLAINED
    assert expected == judge(request, journal, root=ROOT, block_size_tokens=BLOCK)


def test_of_several_batches_in_one_write_the_oldest_may_have_done_it() -> None:
    """The newest came behind the first token; the change may be of the one before it."""
    entry = json.loads(line(removed=(1,), engine_s=FIRST_TOKEN_S + 1))
    request = make_request(predicted_blocks=2, actual_blocks=1)

    def verdict(oldest_s: float) -> Verdict:
        lines = [json.dumps(entry | {"oldest_engine_ts_s": oldest_s})]
        return judge(request, Journal.parse(lines), root=ROOT, block_size_tokens=BLOCK)

    assert verdict(FIRST_TOKEN_S - 0.001) is Verdict.EXPLAINED
    assert verdict(FIRST_TOKEN_S + 0.5) is Verdict.UNEXPLAINED


@pytest.mark.parametrize(
    ("name", "predicted_blocks", "actual_blocks", "expected"),
    [
        ("came_back", 2, 1, Verdict.EXPLAINED),
        ("came_back", 1, 2, Verdict.UNEXPLAINED),
        ("came_and_went", 1, 2, Verdict.EXPLAINED),
        ("came_and_went", 2, 1, Verdict.UNEXPLAINED),
    ],
)
def test_what_the_index_never_showed_explains_one_direction(
    name: str, predicted_blocks: int, actual_blocks: int, expected: Verdict
) -> None:
    """A block that was gone for a while explains a missing hit, one that was there an extra one."""
    entry = json.loads(line()) | {name: [CHAIN[1].hex()]}
    request = make_request(predicted_blocks=predicted_blocks, actual_blocks=actual_blocks)
    journal = Journal.parse([json.dumps(entry)])
    assert expected == judge(request, journal, root=ROOT, block_size_tokens=BLOCK)


def test_a_broken_journal_is_refused() -> None:
    """A journal that cannot be read must not pass for an empty one."""
    with pytest.raises(KeyError, match="added"):
        Journal.parse(['{"published_s": 1, "engine_ts_s": 1, "instance_id": "a"}'])
