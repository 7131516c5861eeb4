"""Prompts as token ids and chats as words, the same in every run."""

import numpy as np

from tests.vllm.settings import BLOCK

TOKEN_MIN = 3  # below are the special tokens
TOKEN_MAX = 4095

WORDS = (
    *("index", "router", "engine", "block", "prefix", "token", "shared", "batch", "queue"),
    *("import", "return", "class", "value", "error", "self", "length", "string", "default"),
)


class Prompts:
    """Draws prompts; no two draws share a first block."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def ids(self, tokens: int) -> list[int]:
        """So many random token ids."""
        drawn: list[int] = self._random.integers(TOKEN_MIN, TOKEN_MAX, tokens).tolist()
        return drawn

    def blocks(self, blocks: int, beyond: int = 7) -> list[int]:
        """A prompt of so many full blocks and some tokens beyond them."""
        return self.ids(blocks * BLOCK + beyond)

    def words(self, count: int) -> str:
        """A text of so many words."""
        return " ".join(self._random.choice(WORDS, count).tolist())

    def often(self, items: int, draws: int) -> list[int]:
        """Draw indices of items, the first ones much more often than the last."""
        weights = 1.0 / np.arange(1, items + 1)
        drawn: list[int] = self._random.choice(items, draws, p=weights / weights.sum()).tolist()
        return drawn
