"""What a virtual fleet of the lab consists of. Pure."""

from dataclasses import dataclass
from typing import Final

from workers.simulated.eviction.policies import LRU
from workers.simulated.tier import TierConfig

REPORT_INTERVAL_S: Final = 0.1
"""Of sidecars that ask the engine's metrics, as they do unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handovers:
    """How KV$ gets from a prefill instance to a decode instance.

    Attributes:
        tokens_per_s: of one transfer; what the decode instance holds already is not sent.
        latency_s: of each transfer.
    """

    tokens_per_s: float = 127_000.0
    latency_s: float = 0.005

    def transfer_s(self, tokens: int) -> float:
        """Seconds that handing so many tokens over takes."""
        return self.latency_s + tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """The fleet.

    Attributes:
        instances: how many, all of one profile.
        prefill_instances: how many of them only prefill, the others then only decode; 0: all do
            both.
        handovers: between those.
        routers: how many; each request goes to a random one, drawn apart from the workload.
        staleness_s: 0: routers share their reservations, as through Redis. Else each knows its own
            requests at once and everything else so much later; no reservation answers.
        detects_hot_prefixes: routers take the holders of too hot a prefix out (`router.detector`);
            needs shared reservations.
        capacity_blocks: of each instance's cache; None: the profile's.
        eviction: policy of each instance, of `workers.simulated.eviction.policies`.
        tier: a store of KV$ that all instances share and routers credit; None: there is none.
        decide_s: arrival -> the choice, with the counters of then; and a prefill's end -> the
            choice of who decodes.
        note_s: first token or end -> the counters say so.
        events_s: the end of an engine's step -> the index knows its blocks.
        report_interval_s: between an engine's reports of running and waiting requests.
        sample_interval_s: between looks at the instances' busy time.
    """

    instances: int = 16
    prefill_instances: int = 0
    handovers: Handovers = Handovers()
    routers: int = 1
    staleness_s: float = 0.0
    detects_hot_prefixes: bool = False
    profile: str = "h20-qwen3-30b-a3b"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    capacity_blocks: int | None = None
    eviction: str = LRU
    tier: TierConfig | None = None
    decide_s: float = 0.002
    note_s: float = 0.001
    events_s: float = 0.020
    report_interval_s: float = REPORT_INTERVAL_S
    sample_interval_s: float = 1.0

    @property
    def is_parted(self) -> bool:
        """Prefill and decode are apart."""
        return self.prefill_instances > 0
