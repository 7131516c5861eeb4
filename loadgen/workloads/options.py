"""Pure: what a trace leaves open and its reader has to be told."""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

PromptMaking = Literal["unique", "reuse"]
"""How prompts of a trace without block ids are made.

unique: no two prompts share a token. reuse: the leading `reuse_ratio` of every prompt is that of
its group (a ServeGen client, or one of `reuse_groups_count` groups of zipf popularity), the rest
unique.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Choices for what a trace does not say; each reader's module names those that it needs.

    Args:
        prompts: see `PromptMaking`; None: not chosen, which traces without blocks refuse.
        reuse_ratio: 0..1, leading share of a prompt that its group has in common.
        reuse_groups_count: groups of prompts, where the trace has no clients of its own.
        block_size_tokens: grain of the block ids of traces that have none.
        text_as: traces of real text become block ids of that text, or the text itself.
        chars_per_token: characters of text per token.
        session_rate: sessions that begin, per second, as a Poisson process; None: the trace's own
            starts, which traces without a common clock refuse.
        shared_prefix: sessions with equal tool and system parts share them (weka).
        tool_think_s: mean pause before a call that answers a tool (tau-bench), exponential.
        user_think_s: mean pause before a call that answers a person (tau-bench), exponential.
        ttft_s: assumed time to first token, where arrivals follow answers (tau-bench).
        tpot_s: assumed time per further token, likewise.
        seed: of every draw; equal options and seed give equal rows.
    """

    prompts: PromptMaking | None = None
    reuse_ratio: float = 0.5
    reuse_groups_count: int = 20
    block_size_tokens: int = 64
    text_as: Literal["blocks", "text"] = "blocks"
    chars_per_token: float = 4.0
    session_rate: float | None = None
    shared_prefix: bool = True
    tool_think_s: float = 1.0
    user_think_s: float = 20.0
    ttft_s: float = 0.5
    tpot_s: float = 0.03
    seed: int = 0


class SessionStarts:
    """Starts of sessions as a Poisson process, the first at 0.

    Args:
        session_rate: sessions per second.
        seed: of the gaps.
    """

    @classmethod
    def of(cls, options: ReadOptions) -> Self:
        """The process that the options ask for. Raises ValueError when they name no rate."""
        if options.session_rate is None:
            raise ValueError(
                "the trace's conversations have no common clock: choose how many begin per second "
                "with --session_rate"
            )
        return cls(options.session_rate, options.seed)

    def __init__(self, session_rate: float, seed: int) -> None:
        self._gap_s = 1 / session_rate
        self._generator = np.random.default_rng([seed, 7])
        self._next_s = 0.0

    def next_s(self) -> float:
        """Start of the next session, seconds from the start of the trace."""
        start_s = self._next_s
        self._next_s += float(self._generator.exponential(self._gap_s))
        return start_s
