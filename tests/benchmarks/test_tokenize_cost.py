"""What a turn of a chat costs to tokenize and hash, whole and with what is remembered.

One conversation: a first message that fills the prompt, then answers of about 256 tokens and
questions of about 64. Both ways are measured in turn in one run; the ratio is what carries over to
other machines. Writes build/bench/tokenize.json.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_kinds import SHIPPED

from indexer.contract import block_hash
from router.requests.api_call import ChatPrompt
from router.tokens.encoder import Encoder
from router.tokens.hash_chains import HashChains
from router.tokens.loaded import LoadedTokenizer

pytestmark = pytest.mark.benchmark

OUT = Path(__file__).parents[2] / "build/bench/tokenize.json"
ROUNDS = 5
CACHE_BYTES = 64 * 1024 * 1024
ROOT = block_hash.root(model_scope="m", block_size_tokens=16)
SOURCE = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8").split()
RUNS: list[dict[str, Any]] = []


@pytest.fixture(scope="module")
def loaded() -> LoadedTokenizer:
    """The tokenizer and template of simulated engines."""
    return LoadedTokenizer.load(str(SHIPPED), cache_bytes_max=CACHE_BYTES)


def text(words_count: int, seed: int) -> str:
    """Words of our own documentation, another text for each seed."""
    size = len(SOURCE)
    return " ".join(SOURCE[(seed * 7919 + i * (seed + 1)) % size] for i in range(words_count))


def chat(loaded: LoadedTokenizer, prompt_tokens: int, turn: int) -> list[str]:
    """Rendered prompts of turns 1 to `turn`, the last about so many tokens long."""
    (sample,) = loaded.encoder.encode([text(1000, 1)], add_special_tokens=False)
    words_per_token = 1000 * block_hash.TOKEN_BYTES / len(sample)

    def of_tokens(count: int, seed: int) -> str:
        return text(max(1, int(count * words_per_token)), seed)

    first = max(64, prompt_tokens - (turn - 1) * 320)
    messages = [{"role": "user", "content": of_tokens(first, 1)}]
    prompts = [loaded.render(ChatPrompt(messages=messages))]
    for number in range(2, turn + 1):
        messages.append({"role": "assistant", "content": of_tokens(256, 2 * number)})
        messages.append({"role": "user", "content": of_tokens(64, 2 * number + 1)})
        prompts.append(loaded.render(ChatPrompt(messages=messages)))
    return prompts


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this process: tokenizing may use several threads, and others the machine."""
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


@pytest.mark.parametrize("turn", [1, 2, 10])
@pytest.mark.parametrize("prompt_tokens", [1024, 8192, 32768])
def test_a_turn_whole_and_in_parts(
    loaded: LoadedTokenizer, prompt_tokens: int, turn: int, benchmark: Any
) -> None:
    """Best of a few rounds each; the parts' rounds begin with the turns before."""
    *before, prompt = chat(loaded, prompt_tokens, turn)
    backend = loaded.tokenizer.backend_tokenizer
    whole = Encoder(backend, cache_bytes_max=0)
    (packed,) = whole.encode([prompt], add_special_tokens=False)
    least = dict.fromkeys(("whole_s", "parts_s", "chain_s", "remembered_chain_s"), float("inf"))
    for _ in range(ROUNDS):
        parts, chains = Encoder(backend, cache_bytes_max=CACHE_BYTES), HashChains()
        for earlier in before:
            (ids,) = parts.encode([earlier], add_special_tokens=False)
            chains.chain(ROOT, ids, 16)
        seconds = (
            timed(lambda: whole.encode([prompt], add_special_tokens=False)),
            timed(lambda: parts.encode([prompt], add_special_tokens=False)),  # noqa: B023
            timed(lambda: block_hash.chain(ROOT, packed, 16)),
            timed(lambda: chains.chain(ROOT, packed, 16)),  # noqa: B023
        )
        least = {name: min(least[name], s) for name, s in zip(least, seconds, strict=True)}
    assert parts.encode([prompt], add_special_tokens=False) == [packed]
    benchmark.pedantic(lambda: parts.encode([prompt], add_special_tokens=False), rounds=ROUNDS)
    RUNS.append(
        {
            "prompt_tokens": len(packed) // 4,
            "turn": turn,
            **least,
            "tokenize_ratio": least["whole_s"] / least["parts_s"],
            "chain_ratio": least["chain_s"] / least["remembered_chain_s"],
        }
    )
    benchmark.extra_info.update(RUNS[-1])
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"runs": RUNS}, indent=1))
