"""What a notice means: decoding, canonical blocks of both sides, finding, pace."""

from dataclasses import replace
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.contract import block_hash
from indexer.contract.limits import NOTICE_BLOCKS_MAX
from indexer.contract.records import Notice
from indexer.notices.judgement import (
    NOTICE_BYTES_MAX,
    REASON_CHARACTERS_MAX,
    RESYNC_EVERY_MAX_S,
    Finding,
    Suspicion,
    finding,
    read,
)

CHAIN = block_hash.split(bytes(range(8 * 16)))
NOTICE = Notice(decided_s=10.0, predicted_tokens=32, actual_tokens=64, hashes=b"".join(CHAIN))


def report_of(predicted: int, actual: int, *, block: int = 16, engine_block: int = 16):
    """A report as the sidecar reads it."""
    notice = replace(NOTICE, predicted_tokens=predicted, actual_tokens=actual)
    return read(notice.encode(), block_size_tokens=block, engine_block_size_tokens=engine_block)


@pytest.mark.parametrize(
    ("sizes", "tokens", "is_over", "held", "difference"),
    [
        ((16, 16), (32, 64), False, 4, (2, 4)),
        ((16, 16), (64, 32), True, 2, (2, 4)),
        ((16, 64), (0, 128), False, 8, (0, 8)),  # engine blocks of four canonical ones
        ((16, 64), (64, 127), False, 4, (4, 4)),  # not a whole one of the engine's
        ((64, 16), (0, 96), False, 1, (0, 1)),  # one and a half canonical blocks
        ((64, 16), (112, 96), True, 1, (1, 2)),  # the second one lacks a part
        ((64, 16), (48, 32), True, 0, (0, 1)),  # a whole prompt, whose last token is computed
        ((16, 16), (64, 0), True, 0, (0, 4)),
    ],
)
def test_tokens_become_canonical_blocks(
    sizes: tuple[int, int],
    tokens: tuple[int, int],
    is_over: bool,
    held: int,
    difference: tuple[int, int],
) -> None:
    """What the engine had counts in full blocks; what it lacked in blocks it lacked a part of."""
    report = report_of(*tokens, block=sizes[0], engine_block=sizes[1])
    assert (report.is_over, list(report.engine_had)) == (is_over, CHAIN[:held])
    assert list(report.difference) == CHAIN[slice(*difference)]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"decided_s": 1.0}),
        replace(NOTICE, decided_s=float("nan")).encode(),
        msgpack.packb({**msgpack.unpackb(NOTICE.encode()), "decided_s": "now"}),
        msgpack.packb({**msgpack.unpackb(NOTICE.encode()), "hashes": "text"}),
        replace(NOTICE, actual_tokens=-16).encode(),
        replace(NOTICE, actual_tokens=1 << 40).encode(),
        replace(NOTICE, actual_tokens=True).encode(),
        replace(NOTICE, hashes=NOTICE.hashes[:-1]).encode(),
        replace(NOTICE, hashes=NOTICE.hashes[:24]).encode(),  # less than the deeper of both
        replace(NOTICE, hashes=bytes(8 * (NOTICE_BLOCKS_MAX + 1))).encode(),
    ],
)
def test_malformed_notices_are_refused(raw: bytes) -> None:
    """Whatever is not a notice is a ValueError, nothing else."""
    with pytest.raises(ValueError, match=r".+"):
        read(raw, block_size_tokens=16, engine_block_size_tokens=16)


def test_longest_notice_is_read() -> None:
    """The bound leaves room for every notice a router may send."""
    hashes = bytes(8 * NOTICE_BLOCKS_MAX)
    raw = Notice(
        decided_s=1e10, predicted_tokens=0, actual_tokens=16 * NOTICE_BLOCKS_MAX, hashes=hashes
    ).encode()
    report = read(raw, block_size_tokens=16, engine_block_size_tokens=16)
    assert len(report.difference) == NOTICE_BLOCKS_MAX


def test_overlong_notices_are_not_decoded() -> None:
    """Even where all but an unknown field is right."""
    raw = msgpack.packb({**msgpack.unpackb(NOTICE.encode()), "novelty": bytes(NOTICE_BYTES_MAX)})
    with pytest.raises(ValueError, match="bytes are above"):
        read(raw, block_size_tokens=16, engine_block_size_tokens=16)


@pytest.mark.parametrize("field", ["actual_tokens", "extra"])
def test_refusals_quote_little(field: str) -> None:
    """A refusal is one short line, however long what it refuses is."""
    fields = {**msgpack.unpackb(NOTICE.encode()), field: "x" * 5000}
    raw = msgpack.packb(fields) if field != "extra" else b"\xd9\xff" + b"x" * 255
    with pytest.raises(ValueError, match=r".+") as refused:
        read(raw, block_size_tokens=16, engine_block_size_tokens=16)
    assert len(str(refused.value)) <= REASON_CHARACTERS_MAX


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw: bytes) -> None:
    """No byte string raises anything but ValueError."""
    with pytest.raises(ValueError, match=r".+"):
        read(raw, block_size_tokens=16, engine_block_size_tokens=16)


def test_unknown_fields_of_a_notice_are_ignored() -> None:
    """A newer router may tell more."""
    raw = msgpack.packb({**msgpack.unpackb(NOTICE.encode()), "novelty": 1})
    assert read(raw, block_size_tokens=16, engine_block_size_tokens=16) == report_of(32, 64)


@pytest.mark.parametrize(
    ("predicted", "actual", "held", "changed", "expected"),
    [
        (32, 64, CHAIN[:2], [], Finding.UNDER),
        (32, 64, CHAIN[:3], [], Finding.UNDER),
        (32, 64, CHAIN[:4], [], Finding.EXPLAINED),  # known by now
        (32, 64, CHAIN[:2], CHAIN[3:4], Finding.EXPLAINED),  # came or went in between
        (32, 64, CHAIN[:2], CHAIN[5:6], Finding.UNDER),  # a change behind says nothing
        (64, 32, CHAIN[:4], [], Finding.OVER),
        (64, 32, CHAIN[:4], CHAIN[2:3], Finding.EXPLAINED),
        (64, 32, CHAIN[:3], [], Finding.EXPLAINED),  # not claimed any more
        (64, 32, CHAIN[:4], CHAIN[:2], Finding.OVER),  # a change before says nothing
        (32, 47, CHAIN[:2], [], Finding.EXPLAINED),  # finer than a block
    ],
)
def test_finding(predicted: int, actual: int, held: list, changed: list, expected: Finding) -> None:
    """Only what no change explains counts, and only against what the index says now."""
    report = report_of(predicted, actual)
    got = finding(
        report, has_changed=set(changed).__contains__, is_published=set(held).__contains__
    )
    assert got is expected


def test_three_within_half_a_minute() -> None:
    """Two are chance, three far apart as well; the third within 30 s is one too many."""
    suspicion = Suspicion()
    assert [suspicion.note_over(at_s) for at_s in (0, 20, 40, 60, 61, 62)] == [False] * 4 + [
        True,
        False,
    ]


def test_resynchronisations_become_rare() -> None:
    """At first 30 s apart, doubling to 10 minutes; after as long without one it begins anew."""
    suspicion = Suspicion()
    due_s = [float(at_s) for at_s in range(4000) if suspicion.note_over(float(at_s))]
    gaps_s = [b - a for a, b in pairwise(due_s)]
    assert gaps_s[:6] == [30, 60, 120, 240, 480, RESYNC_EVERY_MAX_S]
    later_s = 4000 + 2 * RESYNC_EVERY_MAX_S
    again_s = [at_s for at_s in range(100) if suspicion.note_over(later_s + at_s)]
    assert again_s[1] - again_s[0] == 30
