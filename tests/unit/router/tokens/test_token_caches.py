"""What is remembered of texts and chains is exact and bounded."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizer_kinds import KINDS, gpt2
from tokenizers import pre_tokenizers
from waiting import until

from indexer.contract import block_hash
from indexer.contract.block_hash import pack_tokens
from router import telemetry
from router.tokens.cuts import FOUND_MAX, LEADS_MAX, Cutter
from router.tokens.encoder import Encoder
from router.tokens.hash_chains import HashChains
from router.tokens.part_cache import ENTRY_BYTES, PartCache
from router.tokens.work_pool import PoolFull, WorkPool

ROOT = block_hash.root(model_scope="m", block_size_tokens=16)


@dataclass
class Added:
    """An added token."""

    content: str
    lstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def test_a_text_is_cut_in_front_of_its_tokens() -> None:
    """The longest that begins at a place counts; without a token the text is one part."""
    cutter = Cutter.of([Added("<a>"), Added("<a><b"), Added("<|x|>")])
    assert cutter is not None
    assert cutter.cut("") == [""]
    assert cutter.cut("text") == ["text"]
    assert cutter.cut("<a>1<a><b2<|x|><a") == ["<a>1", "<a><b2", "<|x|><a"]


@pytest.mark.parametrize(
    "token",
    [
        Added("<a>", lstrip=True),
        Added("<a>", single_word=True),
        Added("<a>", normalized=True),
        Added("word"),
        Added(" <a>"),
        Added("\u00ab"),
    ],
)
def test_nothing_is_cut_at_a_token_that_looks_at_what_is_before_it(token: Added) -> None:
    """Nor at one that something before it could look at."""
    assert Cutter.of([token]) is None


def test_a_token_covered_by_another_is_no_cut() -> None:
    """Tokens that may begin inside each other are all looked for, leftmost first."""
    cutter = Cutter.of([Added("<a>"), Added("x<"), Added("[b]", lstrip=True)])
    assert cutter is not None
    assert cutter.cut("1x<a>2<a>") == ["1x<a>2", "<a>"]


@pytest.mark.parametrize("others", [[], [Added("[b]")]])
def test_a_text_full_of_what_is_no_token_is_cut_alike(others: list[Added]) -> None:
    """Whether its tokens begin alike or not; one full of tokens takes too long to cut at once."""
    cutter = Cutter.of([Added("<a>"), *others])
    assert cutter is not None
    head = "<a" + "<" * (2 * LEADS_MAX)
    parts = [head, "<a>1<", "<a><", "<a>"]
    assert cutter.cut("".join(parts)) == cutter.cut_few("".join(parts)) == parts
    few = "<a>1" * FOUND_MAX
    assert cutter.cut_few(few) == cutter.cut(few)
    assert cutter.cut_few(few + "<a>") is None
    assert len(cutter.cut(few + "<a>")) == FOUND_MAX + 1


def tokens_by_how() -> dict[str, float]:
    """Tokenized tokens so far."""
    names = ("cached", "new", "whole")
    return {name: telemetry.TOKENIZED_TOKENS.labels(name)._value.get() for name in names}


def test_only_what_is_new_is_tokenized() -> None:
    """The turns before come from the cache."""
    encoder, before = Encoder(gpt2(), cache_bytes_max=100_000), tokens_by_how()
    first = "<|im_start|>user\nhello<|im_end|>\n"
    (ids,) = encoder.encode([first], add_special_tokens=False)
    both = encoder.encode([first + "<|im_start|>a"], add_special_tokens=False)[0]
    counts = {how: count - before[how] for how, count in tokens_by_how().items()}
    assert counts == {
        "cached": len(ids) // 4,
        "new": len(both) // 4,  # all once: the first turn's and the second's
        "whole": 0,
    }


def drops_out(tokenizer: Any) -> None:
    """Merges at random, for training."""
    tokenizer.model.dropout = 0.5


def has_its_own_words(tokenizer: Any) -> None:
    """A component in Python."""

    class Own:
        def pre_tokenize(self, text: Any) -> None: ...

    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())


def takes_special_tokens_for_text(tokenizer: Any) -> None:
    """As for texts that nobody trusts."""
    tokenizer.encode_special_tokens = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drops_out, "drop out"),
        (has_its_own_words, "its own"),
        (takes_special_tokens_for_text, "takes special tokens for text"),
    ],
)
def test_where_parts_may_differ_texts_are_tokenized_whole(change: Any, reason: str) -> None:
    """Said, and counted."""
    tokenizer = gpt2()
    change(tokenizer)
    encoder, before = Encoder(tokenizer, cache_bytes_max=100_000), tokens_by_how()
    assert reason in (encoder.whole_reason or "")
    if change is not has_its_own_words:  # that one does not know how to
        encoder.encode(["<|im_start|>hello"], add_special_tokens=False)
        assert tokens_by_how()["whole"] > before["whole"]


def test_a_battery_that_fails_ends_in_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a version of the library does, parts that differ are found at loading."""
    monkeypatch.setattr(Cutter, "cut", lambda _, text: [text[:3], text[3:]])
    assert "other ids than the whole" in (
        Encoder(KINDS["llama3"](), cache_bytes_max=100_000).whole_reason or ""
    )


def test_the_least_recently_used_parts_go_first() -> None:
    """The bound is in bytes; what is larger than all of it is not kept."""
    cache = PartCache(bytes_max=3 * (ENTRY_BYTES + 60))
    for text in ("a", "b", "c"):
        cache.put({text: b"1234"})
    cache.get(["a"])
    cache.put({"d": b"1234", "e" * 2000: b"1234"})
    assert cache.get(["a", "b", "c", "d", "e" * 2000]) == [b"1234", None, b"1234", b"1234", None]
    assert cache.held_bytes <= 3 * (ENTRY_BYTES + 60)


@pytest.mark.parametrize("block_size_tokens", [1, 16, 100, 4096])
def test_remembered_chains_are_the_chains(block_size_tokens: int) -> None:
    """Whatever they have in common with earlier ones, and when the earlier ones are forgotten."""
    ids = list(range(5000))
    prompts = [ids, ids[:4000], [*ids[:2048], 9, *ids[2049:]], ids[:5], [], ids * 2, ids]
    for bytes_max in (0, 10_000, 1_000_000):
        chains = HashChains(bytes_max)
        for prompt in prompts:
            packed = pack_tokens(prompt)
            expected = block_hash.chain(ROOT, packed, block_size_tokens)
            assert chains.chain(ROOT, packed, block_size_tokens) == expected
            assert chains.held_bytes <= bytes_max


def test_another_root_is_another_chain() -> None:
    """A salt separates, also in what is remembered."""
    chains, packed = HashChains(), pack_tokens(range(4096))
    other = block_hash.root(model_scope="m", block_size_tokens=16, salt="s")
    assert chains.chain(ROOT, packed, 16) != chains.chain(other, packed, 16)


async def test_work_nobody_waits_for_is_skipped_and_still_counts() -> None:
    """Until its turn has come it holds its place, so the queue is no longer than it may be."""
    pool, done, release = WorkPool(threads=1, waiting_max=1, name="test"), [], threading.Event()
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        busy = tasks.create_task(pool.run(lambda: release.wait(10)))
        skipped = tasks.create_task(pool.run(lambda: done.append("skipped")))
        await asyncio.sleep(0)
        skipped.cancel()
        await asyncio.wait([skipped])
        with pytest.raises(PoolFull):
            await pool.run(lambda: done.append("refused"))
        release.set()
        await busy
        await until(lambda: not pool._pieces, "the skipped work has had its turn")
        await pool.run(lambda: done.append("done"))
    assert done == ["done"]
    pool.close()
