"""A tier of KV$ behind the devices: what of a prompt can be loaded, and what that counts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from indexer.contract.limits import PROMPT_TOKENS_MAX
from indexer.contract.records import InstanceRecord
from router.policies.prefill_work import PREFILL_TOKENS_PER_S
from router.snapshot import Column, FleetSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLoad:
    """What loading takes: n tokens take latency_s + n / tokens_per_s seconds.

    Attributes:
        tokens_per_s: bandwidth of one instance's loads; above 0. Each one's own, or one for all.
        latency_s: of a load, however long; likewise.
    """

    tokens_per_s: npt.NDArray[np.float64] | float
    latency_s: npt.NDArray[np.float64] | float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRoster:
    """What the records of instances say of their tiers. All columns have shape (instances,).

    Attributes:
        has: it has one.
        shared: it can load what others who share have written.
        load: what loading takes.
    """

    has: npt.NDArray[np.bool_]
    shared: npt.NDArray[np.bool_]
    load: TierLoad

    @classmethod
    def of(cls, records: Sequence[InstanceRecord]) -> "TierRoster | None":
        """Of these instances; None where none of them has a tier."""
        rates = [record.tier_tokens_per_s or 0.0 for record in records]
        if not any(rates):
            return None
        has = np.array(rates) > 0
        return cls(
            has=has,
            shared=has & [record.tier_shared for record in records],
            load=TierLoad(
                tokens_per_s=np.where(has, rates, np.inf),
                latency_s=np.array([record.tier_latency_s for record in records]),
            ),
        )

    def take(self, places: npt.NDArray[np.intp]) -> "TierRoster":
        """Of these places only, in this order."""
        tokens_per_s, latency_s = self.load.tokens_per_s, self.load.latency_s
        assert isinstance(tokens_per_s, np.ndarray), "see `of`"
        assert isinstance(latency_s, np.ndarray), "see `of`"
        return TierRoster(
            has=self.has[places],
            shared=self.shared[places],
            load=TierLoad(tokens_per_s=tokens_per_s[places], latency_s=latency_s[places]),
        )

    def depths(self, own: Column) -> Column:
        """How deep each can load, from how deep the index says it has written."""
        depths = np.where(self.has, own, 0)
        shared = depths[self.shared].max(initial=0)
        return np.where(self.shared, shared, depths)


def with_tier(
    snapshot: FleetSnapshot,
    prompt_tokens: int,
    depth_tokens: Column | int,
    load: TierLoad,
) -> FleetSnapshot:
    """The snapshot with what each instance can load of a prompt, beyond what it holds.

    new prefill tokens = tokens to compute + load time / prefill time per token: what is loaded
    counts as the tokens that the instance would compute in the time its load takes, so every rule
    that goes by new prefill tokens credits it, and reservations queue that much. A slow tier can
    make that more than computing would: an engine that is set up to load does not ask. It is never
    more than the longest prompt. Without a tier, or where it holds nothing of the prompt, the
    snapshot is as it was.

    A request in flight accounts for nothing where the tier holds as much: loading needs no waiting.

    Args:
        snapshot: without a tier.
        prompt_tokens: of the request.
        depth_tokens: leading prompt tokens in the tier, of each instance's own, or one for all.
        load: of every instance.
    """
    assert snapshot.tier_tokens is None, "a tier is counted once"
    depths = np.minimum(depth_tokens, prompt_tokens - 1)
    loadable = depths - depths % snapshot.block_size_tokens
    if not (loadable > snapshot.hit_tokens - snapshot.in_flight_tokens).any():
        return snapshot
    in_flight = np.where(loadable >= snapshot.hit_tokens, 0, snapshot.in_flight_tokens)
    hit = snapshot.hit_tokens - snapshot.in_flight_tokens + in_flight
    loaded = np.maximum(loadable - hit, 0)
    load_s = np.where(loaded > 0, load.latency_s + loaded / load.tokens_per_s, 0.0)
    token_s = _prefill_s_per_token(snapshot, hit + loaded / 2)
    cost = np.minimum(np.ceil(load_s / token_s), PROMPT_TOKENS_MAX).astype(np.int64)
    return replace(
        snapshot,
        hit_tokens=hit,
        in_flight_tokens=in_flight,
        tier_tokens=loaded,
        tier_cost_tokens=cost,
        new_prefill_tokens=prompt_tokens - hit - loaded + cost,
    )


def _prefill_s_per_token(
    snapshot: FleetSnapshot, context_tokens: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """As the fleet's fitted costs say of a token in that context; else by the instance's rate."""
    cost = snapshot.prefill_cost
    if cost is not None:
        token_s = cost.linear_s_per_token + cost.attention_s_per_pair * context_tokens
        return token_s if snapshot.slowness is None else token_s * snapshot.slowness / 1000
    rates = [one.prefill_tokens_per_s or PREFILL_TOKENS_PER_S for one in snapshot.instances]
    return 1 / np.array(rates)
