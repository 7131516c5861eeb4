"""Pure: block ids -> token ids, deterministically and fast.

A trace names its blocks and hides their content. Each id is turned into the same pseudo-random
tokens every time, so two prompts share exactly the prefix that the trace says they share. Token
number i of block b is splitmix64 at counter (b, i), scaled into the vocabulary: no state, so whole
prompts are one vector operation, and a partly filled block is a prefix of its full block.
splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VOCABULARY_TOKENS_MAX = 1 << 20  # four times the largest vocabulary in use; the table takes 8 MiB

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def block_tokens(
    block_ids: Sequence[int], *, block_size_tokens: int, vocabulary_tokens: int, seed: int = 0
) -> npt.NDArray[np.uint32]:
    """Token ids of full blocks, shape (len(block_ids), block_size_tokens), each below vocabulary.

    Args:
        block_ids: 0 .. 2^63 - 1.
        block_size_tokens: row length; a longer one extends the same beginning.
        vocabulary_tokens: exclusive upper bound of token ids.
        seed: another seed gives unrelated content, for a second run against a warm engine.
    """
    assert 1 <= vocabulary_tokens <= VOCABULARY_TOKENS_MAX, vocabulary_tokens
    keys = _mix(np.asarray(block_ids, np.uint64) ^ _mix(np.asarray([seed], np.uint64)))
    counters = np.arange(1, block_size_tokens + 1, dtype=np.uint64) * _GOLDEN
    high = _mix(keys[:, None] + counters) >> np.uint64(32)
    return (high * np.uint64(vocabulary_tokens) >> np.uint64(32)).astype(np.uint32)


class PromptTokens:
    """Prompts of block ids, as arrays and as JSON text.

    Every token id of the vocabulary has its text in one table, padded with spaces (which JSON
    allows between values) to equal width, so the text of a prompt is one gather.

    Args:
        vocabulary_tokens: exclusive upper bound of token ids.
        seed: see `block_tokens`.
    """

    def __init__(self, *, vocabulary_tokens: int, seed: int = 0) -> None:
        assert 1 <= vocabulary_tokens <= VOCABULARY_TOKENS_MAX, vocabulary_tokens
        self._vocabulary_tokens = vocabulary_tokens
        self._seed = seed
        width = len(str(vocabulary_tokens - 1))
        text = "".join(f"{token_id:>{width}}," for token_id in range(vocabulary_tokens))
        self._texts = np.frombuffer(text.encode(), np.uint8).reshape(vocabulary_tokens, width + 1)

    def token_ids(
        self, block_ids: Sequence[int], *, prompt_tokens: int, block_size_tokens: int
    ) -> npt.NDArray[np.uint32]:
        """The first `prompt_tokens` token ids of these blocks."""
        assert 0 < prompt_tokens <= len(block_ids) * block_size_tokens, prompt_tokens
        blocks = block_tokens(
            block_ids,
            block_size_tokens=block_size_tokens,
            vocabulary_tokens=self._vocabulary_tokens,
            seed=self._seed,
        )
        return blocks.reshape(-1)[:prompt_tokens]

    def json_text(
        self, block_ids: Sequence[int], *, prompt_tokens: int, block_size_tokens: int
    ) -> bytes:
        """The same ids as the JSON text of a list, `[  7,123]`."""
        token_ids = self.token_ids(
            block_ids, prompt_tokens=prompt_tokens, block_size_tokens=block_size_tokens
        )
        return b"[" + self._texts[token_ids].tobytes()[:-1] + b"]"


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of splitmix64, element by element, modulo 2^64."""
    mixed = (values ^ (values >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))
