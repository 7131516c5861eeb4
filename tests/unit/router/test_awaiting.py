"""The last full block of a prompt, by the coarser of both block sizes."""

import pytest

from router.awaiting import last_full_block

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
