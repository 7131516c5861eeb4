"""The scenario file: which workloads, loads, policies and fleets are compared. No simulation here.

TOML; every table and field is checked, an unknown one is refused. See docs/policy_lab.md.
"""

import os
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loadgen.errors import LoadgenError
from loadgen.simulation.lab.spec import REPORT_INTERVAL_S
from loadgen.workloads.pacing import Pace
from workers.simulated.eviction.policies import EVICTIONS, LRU

TRACES_VARIABLE = "TIMESTABLE_TRACES"
TRACES_DEFAULT = Path("../shared/traces")

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class ScenarioError(LoadgenError):
    """A scenario file cannot be read or asks for what there is not; the field is named."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkloadSpec(_Table):
    """One workload: a trace where its files are there, else what is generated.

    Attributes:
        name: in tables.
        trace: files of a trace, looked for in the folder of traces.
        read: what the trace leaves open, as options of `loadgen convert`.
        generate: the generated workload, as of `loadgen generate`; for a workload with a trace, its
            twin where the files are missing.
        options: of the generated workload.
        duration_s: of one run, from the first arrival to the last; a trace that is shorter than
            that at the rate of the run ends earlier.
        requests_max: of one run; beyond, it is shorter.
        turns_max: sessions end after so many turns; None: as they are.
        think_max_s: longer pauses are cut to this; None: as they are.
        prompt_tokens_max: conversations with longer prompts are left out; None: none are.
        prompt_length_factor: multiplies prompt lengths and the trace's blocks, so reuse is kept.
        stretch: to bring it to a rate: "time", all gaps alike; "sessions", only between the
            beginnings of sessions.
        pace: "closed_loop" or "timestamps".
        tpot_slo_s: of the goodput; TTFT's is 1 s + 62.5 ms per 1,000 prompt tokens.
        warm_up_ratio: requests that arrive before so much of the session starts are not counted.
        capacity_rps: requests a second of what is generated that count as load 1, see
            `loadgen capacity`; None: found first.
        trace_capacity_rps: the same, of the trace.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    trace: tuple[str, ...] = ()
    read: dict[str, object] = Field(default_factory=dict)
    generate: Literal["chat", "chat_mix", "api_mix", "hot_prefix", "agents"]
    options: dict[str, object] = Field(default_factory=dict)
    duration_s: Positive = 150.0
    requests_max: Count = 12_000
    turns_max: Count | None = None
    think_max_s: Positive | None = None
    prompt_tokens_max: Count | None = None
    prompt_length_factor: Positive = 1.0
    stretch: Literal["time", "sessions"] = "sessions"
    pace: Pace = "closed_loop"
    tpot_slo_s: Positive = 0.05
    warm_up_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.3
    capacity_rps: Positive | None = None
    trace_capacity_rps: Positive | None = None

    def requests_count(self, rate: float) -> int:
        """Requests of a run at a rate, where the trace has as many."""
        return min(max(2, round(rate * self.duration_s)), self.requests_max)


class Tier(_Table):
    """A store of KV$ that all instances share; see `workers.simulated.tier`.

    Attributes:
        capacity_blocks: of 16 tokens.
        tokens_per_s: bandwidth of one instance's loads; 100 Gbit/s at the 98,304 bytes that a token
            of the default profile's model takes.
        latency_s: of a load; an assumption.
        write: blocks go there when a prompt is "computed", or when they are "evicted" from a cache.
    """

    capacity_blocks: Count
    tokens_per_s: Positive = 127_000.0
    latency_s: Annotated[float, Field(ge=0)] = 0.005
    write: Literal["computed", "evicted"] = "computed"


class Fleet(_Table):
    """One shape of fleet.

    Attributes:
        variant: in tables, where fleets differ by more than the numbers beside it.
        staleness_s, detects_hot_prefixes, report_interval_s: see `lab.spec.LabSpec`.
        capacity_blocks: of each instance's cache; None: the profile's.
        tier: behind them; None: there is none.
        prefill_instances: of the instances; they only prefill, and the others only decode. 0: all
            do both.
        transfer_tokens_per_s: from one of those to the other.
        transfer_latency_s: likewise, however long.
    """

    variant: str = ""
    instances: Count = 16
    prefill_instances: Annotated[int, Field(ge=0)] = 0
    transfer_tokens_per_s: Positive = 127_000.0
    transfer_latency_s: Annotated[float, Field(ge=0)] = 0.005
    routers: Count = 1
    staleness_s: Annotated[float, Field(ge=0)] = 0.0
    detects_hot_prefixes: bool = False
    report_interval_s: Positive = REPORT_INTERVAL_S
    profile: str = "h20-qwen3-30b-a3b"
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 8192
    capacity_blocks: Count | None = None
    tier: Tier | None = None

    @model_validator(mode="after")
    def _detector_needs_shared_reservations(self) -> "Fleet":
        if self.detects_hot_prefixes and self.staleness_s:
            raise ValueError(
                "detects_hot_prefixes needs reservations that are shared: staleness_s = 0"
            )
        return self

    @model_validator(mode="after")
    def _somebody_decodes(self) -> "Fleet":
        if self.prefill_instances >= self.instances:
            raise ValueError(
                f"prefill_instances = {self.prefill_instances} of {self.instances} instances leave "
                "none that decodes"
            )
        return self

    @property
    def told_variant(self) -> str:
        """The variant, and how often engines report where that is not as ever."""
        interval_s = self.report_interval_s
        is_usual = interval_s == REPORT_INTERVAL_S
        reports = "" if is_usual else f"reports every {interval_s:g} s"
        return " ".join(filter(None, (self.variant, reports)))

    @property
    def label(self) -> str:
        """What results know it by."""
        plain = f"{self.instances} instances, {self.routers} routers, {self.staleness_s:g} s stale"
        return f"{plain}, {self.told_variant}" if self.told_variant else plain


class Scenario(_Table):
    """Everything that is run: workloads x loads x fleets x evictions x policies x seeds.

    Attributes:
        policies: of routing.
        evictions: of each instance's cache, of `workers.simulated.eviction.policies`.
        loads: fractions of each workload's capacity.
        capacity_policy: the policy whose limit is load 1, on the first fleet.
    """

    policies: Annotated[tuple[str, ...], Field(min_length=1)]
    loads: Annotated[tuple[Positive, ...], Field(min_length=1)] = (0.5, 0.9, 1.1)
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    fleets: Annotated[tuple[Fleet, ...], Field(min_length=1)] = (Fleet(),)
    workloads: Annotated[tuple[WorkloadSpec, ...], Field(min_length=1)]
    evictions: Annotated[tuple[str, ...], Field(min_length=1)] = (LRU,)
    capacity_policy: str = "lmetric"

    @model_validator(mode="after")
    def _named_once(self) -> "Scenario":
        """What the results could not tell apart would count as one."""
        named: dict[str, list[str]] = {
            "workloads": [workload.name for workload in self.workloads],
            "fleets": [fleet.label for fleet in self.fleets],
            "policies": list(self.policies),
            "evictions": list(self.evictions),
            "loads": [f"{load:g}" for load in self.loads],
            "seeds": [str(seed) for seed in self.seeds],
        }
        for what, names in named.items():
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                hint = "; give each a variant of its own" if what == "fleets" else ""
                raise ValueError(f"{what} named twice: {', '.join(twice)}{hint}")
        for name in self.evictions:
            if name not in EVICTIONS:
                raise ValueError(f"evictions: no `{name}`; there are {', '.join(EVICTIONS)}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The folder of traces."""

    folder: Path

    @classmethod
    def of(cls, folder: str | None) -> "Traces":
        """The folder given, else that of the environment variable, else the default one."""
        return cls(folder=Path(folder or os.environ.get(TRACES_VARIABLE) or TRACES_DEFAULT))

    def paths(self, workload: WorkloadSpec) -> list[Path] | None:
        """The files of a workload's trace; None where it has none or they are not all there."""
        found = [self.folder / name for name in workload.trace]
        return found if found and all(path.is_file() for path in found) else None

    def capacity_rps(self, workload: WorkloadSpec) -> float | None:
        """The stated capacity of what is run: the trace, or its twin."""
        is_trace = self.paths(workload) is not None
        return workload.trace_capacity_rps if is_trace else workload.capacity_rps


def load_scenario(name: str) -> Scenario:
    """A scenario by the name of a shipped one, or by its path.

    Raises:
        ScenarioError: there is none, or it does not say what it must.
    """
    shipped = files("loadgen") / "scenarios" / f"{name}.toml"
    try:
        text = (shipped if shipped.is_file() else Path(name)).read_text(encoding="utf-8")
    except OSError as error:
        known = sorted(
            entry.name.removesuffix(".toml")
            for entry in (files("loadgen") / "scenarios").iterdir()
            if entry.name.endswith(".toml")
        )
        raise ScenarioError(
            f"scenario {name}: {error.strerror or error}; shipped ones: {', '.join(known)}"
        ) from error
    try:
        return Scenario.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"scenario {name} is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ScenarioError(f"scenario {name}, {where}: {first['msg']}") from error
