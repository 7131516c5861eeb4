"""Block ids to token ids."""

import json

from loadgen.tokens import PromptTokens, block_tokens


def test_tokens_never_change() -> None:
    """Golden values: block 0 is splitmix64 of seed 0, whose first output is 0xe220a8397b1dcdaf."""
    tokens = block_tokens((0, 1), block_size_tokens=4, vocabulary_tokens=32_000)
    assert 28265 == 0xE220A839 * 32_000 >> 32
    assert tokens.tolist() == [[28265, 13808, 845, 31068], [23991, 11916, 14025, 30531]]


def test_another_seed_gives_other_tokens() -> None:
    """A second run against a warm engine can be made to hit nothing."""
    first, second = (
        block_tokens((5,), block_size_tokens=64, vocabulary_tokens=1000, seed=seed)
        for seed in (0, 1)
    )
    assert (first != second).mean() > 0.9


def test_tokens_use_the_whole_vocabulary_and_no_more() -> None:
    """Every id of a small vocabulary occurs in a long block."""
    tokens = block_tokens((3,), block_size_tokens=4096, vocabulary_tokens=16)
    assert set(range(16)) == set(tokens.reshape(-1).tolist())


def test_largest_block_id_is_accepted() -> None:
    """Ids are 63-bit."""
    tokens = block_tokens((2**63 - 1,), block_size_tokens=4, vocabulary_tokens=10)
    assert tokens.shape == (1, 4)


def test_json_text_is_the_same_list() -> None:
    """The padded text parses to the array."""
    prompts = PromptTokens(vocabulary_tokens=1000)
    text = prompts.json_text((1, 2, 3), prompt_tokens=150, block_size_tokens=64)
    array = prompts.token_ids((1, 2, 3), prompt_tokens=150, block_size_tokens=64)
    assert array.tolist() == json.loads(text)
    assert len(array) == 150
