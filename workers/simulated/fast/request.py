"""One request of the fast engine: block identities instead of tokens, and its progress. Pure."""

from dataclasses import dataclass

import numpy as np

from workers.simulated.eviction.base import Category
from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.free_order import BlockIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRequest:
    """What the engine is asked to do.

    Attributes:
        request_id: unique among the requests in the engine.
        prompt_tokens: length of the prompt; at least one.
        output_tokens: how many tokens to generate; at least one.
        blocks: identities of the full blocks of prompt and answer, in order and distinct; of
            blocks x block size <= prompt_tokens + output_tokens - 1 tokens, as many as fit. (The
            newest token's KV$ never exists, so the last one is in no block.) A block that holds
            some of the answer and that no other prompt continues has an identity of its own.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    blocks: Identities
    category: Category | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV$ exists in the end."""
        return self.prompt_tokens + self.output_tokens - 1


class ActiveChain:
    """A request's progress, owned by the engine.

    While it decodes, a request's tokens follow from the engine's count of steps: see
    `Decoders`. Otherwise `token_count` and `computed_tokens` say. Its blocks are in an array as far
    as they were full when it began to decode, and one by one in a list behind that.

    Attributes:
        request: what was asked.
        rank: place in the order of admission; the youngest has the highest.
        token_count: prompt tokens plus generated ones.
        computed_tokens: tokens whose KV$ exists.
        token_offset: token count minus the engine's steps, constant while it decodes.
        held: blocks held, in chain order: the first `held_count` are valid.
        stored_blocks: leading blocks that are resident under their identity; not while it decodes.
        grown: while it decodes, the further blocks; the last one is being filled, or is full.
        unstored: while it decodes, identities of the blocks not yet full, the next one last.
        hit_tokens: prompt tokens resident on the device at first admission; None before it.
    """

    __slots__ = (
        "computed_tokens",
        "grown",
        "held",
        "held_count",
        "hit_tokens",
        "rank",
        "request",
        "stored_blocks",
        "token_count",
        "token_offset",
        "unstored",
    )

    def __init__(self, request: ChainRequest) -> None:
        self.request = request
        self.rank = -1
        self.token_count = request.prompt_tokens
        self.computed_tokens = 0
        self.token_offset = 0
        self.held: BlockIds = np.empty(0, np.intp)
        self.held_count = 0
        self.stored_blocks = 0
        self.grown: list[int] = []
        self.unstored: list[int] = []
        self.hit_tokens: int | None = None

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far; not while it decodes."""
        return self.token_count - self.request.prompt_tokens

    def begin(self, hit: BlockIds, blocks: int) -> None:
        """Admitted: these blocks are resident, so many are needed before it decodes."""
        self.held = np.empty(blocks, np.intp)
        self.held[: len(hit)] = hit
        self.held_count = self.stored_blocks = len(hit)

    def begin_to_decode(self) -> None:
        """From here on its blocks come one by one."""
        stored = self.stored_blocks
        self.grown = self.held[stored : self.held_count].tolist()
        self.held_count = stored
        self.unstored = self.request.blocks[stored:].tolist()
        self.unstored.reverse()

    def take_chain(self) -> BlockIds:
        """Back to nothing computed; returns the blocks it held."""
        chain = self.held[: self.held_count]
        if self.grown:
            chain = np.concatenate([chain, self.grown])
            self.grown = []
        self.held_count = self.computed_tokens = self.stored_blocks = 0
        return chain
