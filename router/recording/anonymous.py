"""Pure: block hashes under a secret key (SipHash-2-4), so that nobody can look for known texts.

Block hashes are the same in every fleet that serves a model, so they would tell whether a known
text was asked. Under a key that is drawn for one recording and never written, equal blocks still
have equal ids, and nothing else can be told of them.
"""

import os
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

KEY_BYTES: Final = 16
ID_MAX: Final = (1 << 63) - 1
"""Readers of traces take signed integers of 64 bits."""

_START: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH: Final = np.uint64(8 << 56)  # of a message, in its last word
_END: Final = np.uint64(0xFF)
_MESSAGE_ROUNDS: Final = 2
_END_ROUNDS: Final = 4


def keyed(words: Words, key: bytes) -> Words:
    """SipHash-2-4 of each word as a message of 8 bytes, little-endian."""
    first, second = np.frombuffer(key, "<u8").tolist()
    state = [
        np.full(len(words), start ^ part, np.uint64)
        for start, part in zip(_START, (first, second, first, second), strict=True)
    ]
    for message in (words, np.full(len(words), _LENGTH)):
        state[3] ^= message
        for _ in range(_MESSAGE_ROUNDS):
            _mix(state)
        state[0] ^= message
    state[2] ^= _END
    for _ in range(_END_ROUNDS):
        _mix(state)
    digests: Words = state[0] ^ state[1] ^ state[2] ^ state[3]
    return digests


def block_ids(hashes: bytes, key: bytes) -> list[int]:
    """Ids of blocks, 0 to ID_MAX, from their hashes as the index has them, one after another.

    A call has a fixed cost, that of hashing some 2,000 blocks: of many prompts, one call.
    """
    ids: list[int] = (keyed(np.frombuffer(hashes, "<u8"), key) >> np.uint64(1)).tolist()
    return ids


def unique_ids(count: int) -> list[int]:
    """Ids, 0 to ID_MAX, that no block has."""
    ids: list[int] = (np.frombuffer(os.urandom(8 * count), "<u8") >> np.uint64(1)).tolist()
    return ids


def _mix(state: list[Words]) -> None:
    """One round, in place."""
    a, b, c, d = state
    _half(a, b, 13)
    _half(c, d, 16)
    _turn(a, 32)
    _half(a, d, 21)
    _half(c, b, 17)
    _turn(c, 32)


def _half(one: Words, other: Words, bits: int) -> None:
    one += other
    _turn(other, bits)
    other ^= one


def _turn(words: Words, bits: int) -> None:
    """Rotate to the left, in place."""
    low = words >> np.uint64(64 - bits)
    words <<= np.uint64(bits)
    words |= low
