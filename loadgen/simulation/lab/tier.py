"""The tier of a virtual fleet: engines load from it, routers know what it holds. Pure."""

from router.snapshot import FleetSnapshot
from router.tier import TierLoad, with_tier
from workers.simulated.fast.block_columns import Identities
from workers.simulated.fast.tier import TierColumns
from workers.simulated.tier import TierConfig


class LabTier:
    """One tier behind all instances of a fleet.

    Attributes:
        columns: for the engines.
    """

    def __init__(self, config: TierConfig, *, block_size_tokens: int) -> None:
        """An empty tier.

        Args:
            config: its size and speed.
            block_size_tokens: of the engines.
        """
        self.columns = TierColumns(config)
        self._load = TierLoad(tokens_per_s=config.tokens_per_s, latency_s=config.latency_s)
        self._block_size_tokens = block_size_tokens

    def seen(
        self, snapshot: FleetSnapshot, prompt_tokens: int, blocks: Identities
    ) -> FleetSnapshot:
        """What a router knows with the tier: what it holds at this moment, told without delay.

        Args:
            snapshot: without the tier.
            prompt_tokens: of the request.
            blocks: the full blocks of its prompt.
        """
        if len(blocks):
            self.columns.learn(int(blocks.max()) + 1)
        depth_tokens = self.columns.match(blocks) * self._block_size_tokens
        return with_tier(snapshot, prompt_tokens, depth_tokens, self._load)
