"""What tells that a prefill has ended: the last full block, else a ticket, else soon."""

import numpy as np
import pytest
from builders import make_fleet_record, make_snapshot

from router.awaiting import PrefillEnd, last_full_block, ticket
from router.snapshot import Booking, Decision

HASHES = b"".join(bytes([n]) * 8 for n in range(1, 9))


@pytest.mark.parametrize(
    ("prompt_tokens", "canonical", "engine", "expected"),
    [
        (128, 16, 16, 8),
        (127, 16, 16, 7),
        (127, 16, 64, 4),
        (63, 16, 64, None),
        (15, 16, 16, None),
        (130, 64, 16, 2),
        (500, 16, 16, 8),  # the chain covers no more
        (500, 16, 64, 8),
    ],
)
def test_the_last_block_that_the_engine_stores_whole(
    prompt_tokens: int, canonical: int, engine: int, expected: int | None
) -> None:
    """Full in blocks of the engine and in canonical ones; None when there is none."""
    block = last_full_block(
        HASHES[: 8 * (prompt_tokens // canonical)],
        prompt_tokens=prompt_tokens,
        block_size_tokens=canonical,
        engine_block_size_tokens=engine,
    )
    assert block == (None if expected is None else bytes([expected]) * 8)


def decided(booked_s: float = 1.0) -> Decision:
    """For the only instance of a fleet, whose blocks have 16 tokens."""
    snapshot = make_snapshot(hit_tokens=[0])
    return Decision(policy="p", snapshot=snapshot, scores=np.zeros(1), index=0, booked_s=booked_s)


def booked(sequence: int = 1) -> Booking:
    """A booking of the one fleet."""
    return Booking(fleet=make_fleet_record(), sequence=sequence)


@pytest.mark.parametrize(
    ("hashed_tokens", "prompt_tokens", "is_ticket"), [(0, 15, False), (0, 16, True), (15, 90, True)]
)
def test_without_a_full_block_a_ticket(
    hashed_tokens: int, prompt_tokens: int, is_ticket: bool
) -> None:
    """As soon as there is a block's worth to compute; less is not worth awaiting."""
    end = PrefillEnd(
        request_id="r",
        first_byte_tells=False,
        hashes=b"",
        hashed_tokens=hashed_tokens,
        prompt_tokens=prompt_tokens,
        block_size_tokens=16,
    )
    expected = ticket("r", booked(), decided()) if is_ticket else None
    assert end.awaited(decided(), booked()) == expected


def test_every_booking_has_its_own_ticket() -> None:
    """Also of equal request ids, of this router's or of two routers'; none is the empty hash."""
    tickets = [
        ticket("r", booked(1), decided(1.0)),
        ticket("r", booked(2), decided(1.0)),
        ticket("r", booked(1), decided(1.5)),
        ticket("s", booked(1), decided(1.0)),
    ]
    assert len(set(tickets)) == 4
    assert all(len(one) == 8 and any(one) for one in tickets)
