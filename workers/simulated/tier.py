"""A store of KV$ behind the devices of a whole fleet: what an engine lacks it may load. Pure.

The model, a simplification of LMCache with its defaults:

- An engine writes a prompt's full blocks when the last of the prompt has been computed, those it
  hit among them; answers are not written (`save_decode_cache` is off). Writing takes no time: it
  goes on beside the computing. From then on every engine of the fleet may load them.
- Or it is written what an engine's own cache gives up, prompts and answers, when a block's place is
  taken (`write="evicted"`): demoted instead of lost, and nothing is in the tier that never left.
- At its admission a request loads the leading blocks behind those that are on its device, as far as
  the tier holds them without a hole and short of its last token. The engine waits for them: the
  step that admits the request takes longer by latency + tokens / bandwidth, one request after the
  other. Every engine has the whole bandwidth to itself.
- The least recently written block goes first, and of a chain the tail. A prompt that comes again
  is written again, wherever its blocks were hit or loaded from.

An engine's requests see what has been written by calls before theirs, so events at the very same
moment count in the order of the caller.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


class TierError(ValueError):
    """A tier cannot be like that; the message says what would be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Size and speed of a tier.

    Attributes:
        capacity_blocks: blocks it holds, of the engines' size; at least one.
        tokens_per_s: bandwidth of one engine's loads: bytes per second over KV$ bytes per token.
        latency_s: of a load, however long.
        write: which blocks go there: those of a prompt when it is "computed", or any when it is
            "evicted" from an engine's own cache.
    """

    capacity_blocks: int
    tokens_per_s: float
    latency_s: float
    write: Literal["computed", "evicted"] = "computed"

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            TierError: naming the attribute.
        """
        if self.capacity_blocks < 1:
            raise TierError(
                f"capacity_blocks: {self.capacity_blocks} is below 1; for no tier: none"
            )
        if not self.tokens_per_s > 0:
            raise TierError(f"tokens_per_s: {self.tokens_per_s} is not above 0")
        if not self.latency_s >= 0:
            raise TierError(f"latency_s: {self.latency_s} is not 0 or above")

    @property
    def takes_evicted(self) -> bool:
        """It is written when blocks are evicted."""
        return self.write == "evicted"

    def load_s(self, tokens: int) -> float:
        """Seconds that loading so many tokens takes; none for none."""
        return self.latency_s + tokens / self.tokens_per_s if tokens else 0.0


class KvTier:
    """The tier of the step-by-step engines, by block hash.

    Attributes:
        config: its size and speed.
        medium: under which its only engine's events tell of it; None: they do not.
    """

    def __init__(self, config: TierConfig, *, medium: str | None = None) -> None:
        assert medium is None or not config.takes_evicted, "an evicted block's tokens are not known"
        self.config = config
        self.medium = medium
        self._kept: OrderedDict[int, None] = OrderedDict()  # the next to go first

    def __len__(self) -> int:
        """Blocks it holds."""
        return len(self._kept)

    def match(self, hashes: Sequence[int]) -> int:
        """How many leading ones of these blocks it holds; changes nothing."""
        kept = self._kept
        return next((i for i, name in enumerate(hashes) if name not in kept), len(hashes))

    def demote(self, hashes: Sequence[int]) -> None:
        """Hold these blocks, evicted in this order, perhaps one twice; what is too much goes."""
        self.write(hashes[::-1])

    def write(self, hashes: Sequence[int]) -> list[int]:
        """Hold this chain, from its first block on; returns what is too much and was dropped."""
        kept = self._kept
        for name in reversed(hashes):
            kept[name] = None
            kept.move_to_end(name)
        too_many = len(kept) - self.config.capacity_blocks
        return [kept.popitem(last=False)[0] for _ in range(too_many)]
