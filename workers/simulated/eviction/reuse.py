"""How soon blocks of a category are reused: an exponential fit, and what follows. Pure."""

from dataclasses import dataclass
from math import exp
from typing import Final

GAP_S_MIN: Final = 0.3
"""Shorter gaps are those of shared system prompts and tell nothing of a category."""

COUNT_MIN: Final = 1e-9
"""Faded to less, reuses or gaps are none: far below, their ratios would not be numbers."""


def reuse_priority(reused_ratio: float, gap_rate: float, age_s: float, life_s: float) -> float:
    """Chance that a block is reused, and within `life_s` from now: p (e^(-at) - e^(-a(t + life))).

    Args:
        reused_ratio: p, share of the category's blocks that were ever reused.
        gap_rate: a, of the exponential distribution of the gaps until then, per second.
        age_s: t, since its last use.
        life_s: how far ahead is looked.
    """
    return reused_ratio * exp(-gap_rate * age_s) * (1 - exp(-gap_rate * life_s))


@dataclass(slots=True)
class ReuseFit:
    """Uses of a category's blocks, and what came of them.

    Attributes:
        seen: blocks that it has stored or hit.
        reused: of these, those hit or stored again, whoever did.
        gaps_s: sum of the gaps between, without those below GAP_S_MIN.
        gaps: their number.
    """

    seen: float = 0.0
    reused: float = 0.0
    gaps_s: float = 0.0
    gaps: float = 0.0

    def add_reuse(self, gap_s: float) -> None:
        """A block was used again so long after it became free; 0: before that."""
        self.reused += 1
        if gap_s >= GAP_S_MIN:
            self.gaps_s += gap_s
            self.gaps += 1

    def fade(self, factor: float) -> None:
        """What was seen until now counts for less."""
        self.seen *= factor
        self.reused *= factor
        self.gaps_s *= factor
        self.gaps *= factor
        if self.gaps < COUNT_MIN:
            self.gaps = self.gaps_s = 0.0
        if self.reused < COUNT_MIN:
            self.reused = 0.0

    def priority(self, age_s: float, life_s: float) -> float:
        """Of a block last used so long ago; 0 where none was ever reused.

        Where all gaps were short, they are taken to be GAP_S_MIN.
        """
        if not self.reused:
            return 0.0
        rate = self.gaps / self.gaps_s if self.gaps else 1 / GAP_S_MIN
        # Reuses of what was seen before the fading outlive their blocks: at most all are reused.
        reused_ratio = min(1.0, self.reused / self.seen) if self.seen else 1.0
        return reuse_priority(reused_ratio, rate, age_s, life_s)
