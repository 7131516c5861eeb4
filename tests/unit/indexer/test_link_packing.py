"""Commands are packed as they were given, whatever kind of number an option or a column has."""

from enum import IntEnum

import numpy as np
import pytest
from jsonargparse.typing import PositiveInt

from indexer.contract.link.wire import packed


class Level(IntEnum):
    """A whole number with a name."""

    HIGH = 3


@pytest.mark.parametrize("number", [3, PositiveInt(3), np.int64(3), Level.HIGH, True + 2])
def test_whole_numbers_of_every_kind_are_their_digits(number: int) -> None:
    """Hiredis itself takes plain ones only."""
    assert packed(("SET", b"key", number)) == b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$1\r\n3\r\n"


@pytest.mark.parametrize("number", [0.1 + 0.2, 1796000000.123456, 5e-324, float("inf")])
def test_fractions_lose_nothing(number: float) -> None:
    """What Redis gets is what Python reads back."""
    assert float(packed((number,)).split(b"\r\n")[2]) == number
