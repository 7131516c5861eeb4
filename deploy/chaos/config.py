"""Options of `python -m deploy.chaos`."""

from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from deploy.local.config import FleetConfig
from indexer.contract.limits import INSTANCE_GRACE_S

FIRST_BYTE_TIMEOUT_S = 3.0
"""Of the routers: a hanging engine is left for another one within a phase."""


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Do every fault to a local fleet under load, and tell what it cost.

    Exit status: 0; 1 something was lost beyond what a killed part carried itself, counters are not
    zero, or the fleet did not recover; 2 a bad option.

    Args:
        faults: names, separated by commas; all when empty.
        soak_s: instead of the list once, random rounds for so long, in each of which a fault of
            clients, one of instances, one of routers and one of Redis last at the same time.
        quick: the whole list with short phases.
        rate: requests a second.
        seed: of the load, and of the order of a soak.
        workers: simulated engines.
        routers: router processes.
        calm_s: load before a fault, and again after the fleet has recovered.
        recovery_deadline_s: how long the fleet may take to recover.
        zero_deadline_s: how long counters may take to be zero after the load's end: a
            dead instance keeps what it last reported until its grace is over.
        out_dir: receives summary.json, and the logs of the fleet.
    """

    faults: str = ""
    soak_s: NonNegativeFloat = 0.0
    quick: bool = False
    rate: PositiveFloat = 12.0
    seed: NonNegativeInt = 1
    workers: PositiveInt = 4
    routers: PositiveInt = 2
    calm_s: PositiveFloat = 3.0
    recovery_deadline_s: PositiveFloat = 60.0
    zero_deadline_s: PositiveFloat = 2.0 * INSTANCE_GRACE_S
    out_dir: Path = field(default=Path("build/chaos"))

    def __post_init__(self) -> None:
        """Check names and numbers before anything is started.

        Raises:
            ValueError: naming the key.
        """
        from deploy.chaos.faults import by_name  # noqa: PLC0415 - faults import this module

        by_name(names(self))
        if self.workers < 2 or self.routers < 2:  # noqa: PLR2004 - one to lose, one to stay
            raise ValueError("workers, routers: at least 2 each, or there is nowhere to go")


def names(config: ChaosConfig) -> tuple[str, ...]:
    """The faults asked for; none means all."""
    return tuple(name.strip() for name in config.faults.split(",") if name.strip())


def hold_s(config: ChaosConfig) -> float:
    """How long a fault lasts that has no duration of its own."""
    return 2.0 if config.quick else 5.0


def load_calm_s(config: ChaosConfig) -> float:
    """See `calm_s`; less when quick."""
    return 1.0 if config.quick else float(config.calm_s)


def fleet_of(config: ChaosConfig) -> FleetConfig:
    """The fleet that all this is done to, on ports away from those of `make up`."""
    return FleetConfig(
        workers=config.workers,
        routers=config.routers,
        own_ports=True,
        run_dir=config.out_dir / "fleet",
        router_port=20_000,
        admin_port=20_100,
        engine_port=20_200,
        event_port=20_300,
        metrics_port=20_500,
        redis_port=20_600,
    )
