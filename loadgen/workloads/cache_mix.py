"""Pure: a chat mix and an API mix with the reuse that a large provider published.

From Wang et al., "KVCache Cache in the Wild", arXiv 2506.02634 (USENIX ATC 2025), and measured on
generated samples by the tests:

- an ideal cache hits 62 % of the tokens of chat (its trace A) and 54 % of those of API calls (B);
- reuse by single-turn requests is about as large as by further turns in chat, 97 % of all in API
  calls, where below 0.1 % of requests are further turns;
- 10 % of the blocks receive 77 % of the reuses (here: chat);
- within a category the time until reuse is exponential; 80 % of reuses come within 10 minutes
  in chat, within 10 seconds in API calls;
- chat consists of text, file, image and search requests.

Chosen here, for want of published values: the categories' shares, lengths, mean gaps and numbers of
turns, the number and popularity of system prompts and of clients, all rates. They are set so that
the figures above come out for about 6,000 requests at the rates given (an ideal cache starts empty:
more requests hit more). Sessions arrive as a Poisson process; a client of the API mix has one
template of its own, which nobody else uses (the paper: reuse between users is rare).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import FreshIds, zipf
from loadgen.workloads.growing import GrowingPrompt, Lengths, blocks_of, check, in_order

_SEED_STREAM = 23
_FIXED_SEED = 20_25
"""Of the lengths of shared prefixes: workloads of different seeds differ by traffic only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """One kind of request.

    Args:
        name: the rows' category.
        share: of sessions, relative to the other categories.
        prefixes_count: system prompts or templates, of zipf popularity.
        prefix_zipf_exponent: popularity of the k-th is proportional to k^-exponent.
        prefix: their lengths, in tokens.
        first: what the first turn adds.
        following: what each further turn adds besides the answer before it.
        answer: answer lengths.
        next_turn_ratio: chance that a further turn follows the first, 0..1.
        later_turn_ratio: chance that one more follows a further turn: those who go on, go on.
        gap_mean_s: mean time from a turn to the next, exponential.
    """

    name: str
    share: float
    prefixes_count: int
    prefix_zipf_exponent: float
    prefix: Lengths
    first: Lengths
    following: Lengths
    answer: Lengths
    next_turn_ratio: float
    later_turn_ratio: float
    gap_mean_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMix:
    """Categories and how often their sessions begin. Raises WorkloadError for impossible values.

    Args:
        categories: at least one.
        session_rate: sessions per second, of all categories together.
        turns_max: most turns of a session.
        prompt_tokens_max: a session ends before its prompt would be longer.
        block_size_tokens: grain of block ids.
    """

    categories: tuple[Category, ...]
    session_rate: float
    turns_max: int = 40
    prompt_tokens_max: int = 126_000
    block_size_tokens: int = 16

    def __post_init__(self) -> None:
        check("session_rate", self.session_rate, least=1e-6)
        check("turns_max", self.turns_max, least=1)
        check("prompt_tokens_max", self.prompt_tokens_max, least=1)
        check("block_size_tokens", self.block_size_tokens, least=1)


def _chat(name: str, share: float, gap_mean_s: float, first: float, prefix: float) -> Category:
    return Category(
        name=name,
        share=share,
        prefixes_count=200,
        prefix_zipf_exponent=0.8,
        prefix=Lengths(median=prefix, sigma=0.5),
        first=Lengths(median=first, sigma=1.0),
        following=Lengths(median=120.0, sigma=1.0),
        answer=Lengths(median=250.0, sigma=0.8),
        next_turn_ratio=0.4,
        later_turn_ratio=0.4,
        gap_mean_s=gap_mean_s,
    )


CHAT_MIX = CacheMix(
    categories=(
        _chat("text", 0.6, 820.0, 400.0, 1200.0),
        _chat("search", 0.2, 980.0, 800.0, 1650.0),
        _chat("image", 0.1, 520.0, 500.0, 930.0),
        _chat("file", 0.1, 1350.0, 1200.0, 930.0),
    ),
    session_rate=1.0,
)

API_MIX = CacheMix(
    categories=(
        Category(
            name="api",
            share=1.0,
            prefixes_count=130,
            prefix_zipf_exponent=1.1,
            prefix=Lengths(median=1150.0, sigma=0.6),
            first=Lengths(median=500.0, sigma=1.0),
            following=Lengths(median=120.0, sigma=1.0),
            answer=Lengths(median=60.0, sigma=1.0),
            next_turn_ratio=0.0003,
            later_turn_ratio=0.0,
            gap_mean_s=5.0,
        ),
    ),
    session_rate=20.0,
)


def generate_mix(mix: CacheMix, *, requests_count: int, seed: int) -> Iterator[TraceRow]:
    """Rows in order of arrival, sessions and categories labelled; equal arguments, equal rows."""
    return in_order(mix_sessions(mix, seed), requests_count)


def mix_sessions(mix: CacheMix, seed: int) -> Iterator[tuple[float, list[TraceRow]]]:
    """Start and rows of one session after another, without end."""
    generator = np.random.default_rng([seed, _SEED_STREAM])
    fixed = np.random.default_rng(_FIXED_SEED)
    ids = FreshIds()
    size = mix.block_size_tokens
    prefixes = [
        [ids.take(blocks_of(kind.prefix.draw(fixed), size)) for _ in range(kind.prefixes_count)]
        for kind in mix.categories
    ]
    popularity = [
        np.cumsum(zipf(kind.prefixes_count, kind.prefix_zipf_exponent)) for kind in mix.categories
    ]
    shares = np.cumsum([kind.share for kind in mix.categories])
    start_s, session = 0.0, 0
    while True:
        place = _draw(shares / shares[-1], generator)
        kind = mix.categories[place]
        prompt = GrowingPrompt(ids, size)
        prompt.share(prefixes[place][_draw(popularity[place], generator)])
        turns = _turns(mix, kind, prompt, f"{kind.name}-{session}", generator)
        yield start_s, [replace(row, arrival_s=round(start_s + row.arrival_s, 6)) for row in turns]
        start_s += float(generator.exponential(1 / mix.session_rate))
        session += 1


def _turns(
    mix: CacheMix,
    kind: Category,
    prompt: GrowingPrompt,
    session_id: str,
    generator: np.random.Generator,
) -> Iterator[TraceRow]:
    """The turns of one session, arrivals from its start."""
    arrival_s = 0.0
    prompt.grow(kind.first.draw(generator))
    for turn in range(mix.turns_max):
        if prompt.tokens > mix.prompt_tokens_max:
            return
        answer_tokens = kind.answer.draw(generator)
        yield TraceRow(
            arrival_s=arrival_s,
            prompt_tokens=prompt.tokens,
            output_tokens=answer_tokens,
            block_ids=tuple(prompt.block_ids),
            block_size_tokens=mix.block_size_tokens,
            session_id=session_id,
            turn=turn,
            category=kind.name,
        )
        if generator.random() >= (kind.later_turn_ratio if turn else kind.next_turn_ratio):
            return
        prompt.grow(answer_tokens + kind.following.draw(generator))
        arrival_s += float(generator.exponential(kind.gap_mean_s))


def _draw(cumulative: npt.NDArray[np.float64], generator: np.random.Generator) -> int:
    return min(int(np.searchsorted(cumulative, generator.random())), len(cumulative) - 1)
