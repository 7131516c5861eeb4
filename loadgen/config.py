"""Options of the commands; each field is one option of the command line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jsonargparse import auto_cli
from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    restricted_number_type,
)

from loadgen.analysis.config import AnalyzeConfig
from loadgen.tokens import VOCABULARY_TOKENS_MAX
from loadgen.workloads.agents import AgentSessions
from loadgen.workloads.hot_prefix import HotPrefix
from loadgen.workloads.options import PromptMaking
from loadgen.workloads.pacing import Pace

VocabularySize = restricted_number_type(
    "VocabularySize", int, [(">=", 2), ("<=", VOCABULARY_TOKENS_MAX)]
)

_SWITCHES = ("--quick", "--find_capacity", "--fresh")
"""Options that may stand without a value."""

_DESCRIPTION = """
Measure a fleet through any OpenAI-compatible URL: replay a trace or a generated workload open loop,
keep every token's arrival, and report TTFT, TPOT, goodput and hit ratio. To begin, make a workload
with "generate --out chat.jsonl.gz", or of a trace with "convert", and run it with
"replay --trace chat.jsonl.gz --url URL".
"""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Replay a trace against a URL; prints the figures and keeps the raw records.

    Exit status: 0, 1 when no request succeeded, 2 for a bad option or file, 130 after Ctrl-C (what
    was measured until then is kept).

    Args:
        trace: trace file, Timestable, Mooncake or Bailian format; convert others first
        url: base URL of a router or of a bare engine
        model: model name in the requests; the URL's first model unless given
        out: file of the raw records (.jsonl, .jsonl.gz), input of the report command
        name: name of this run in tables and plots
        html: also write an HTML report to this file
        json: also write the figures as JSON to this file
        skip_bad_rows: count broken rows of the trace and leave them out instead of stopping
        first_row: leave out the rows before this one
        rows_count: consider so many rows; all unless given
        whole_conversations: take conversations with all their turns or not at all
        turns_min: leave out conversations with fewer turns
        prompt_tokens_max: leave out conversations with longer prompts
        requests_max: draw whole conversations up to so many requests
        prompt_length_factor: multiply prompt lengths, keeping the reuse
        output_length_factor: multiply answer lengths
        arrivals: trace = its own arrivals, stretched to request_rate if given; poisson, constant
        request_rate: requests per second; needed with poisson and constant
        wait_for_previous_turn: send no follow-up before the turn before it is answered
        pace: timestamps = each request at its arrival; closed_loop = a follow-up a think time
            after the answer before it: the trace's own, else by the gap between arrivals
        in_flight_max: requests in flight at most; waiting for a slot shows as schedule lag
        seed: of the draw of conversations and of random arrivals
        vocabulary_tokens: token ids stay below this; every model in use has more
        token_seed: another value gives every block other tokens, so older runs' KV$ is no help
        headers: further request headers, e.g. '{"x-timestable-policy": "round_robin"}'
        api_key: sent as bearer token
        connect_timeout_s: deadline of a connection
        request_timeout_s: deadline of a whole request
        slo_ttft_s: goodput wants TTFT within this ...
        slo_ttft_per_1000_prompt_tokens_s: ... plus this per 1,000 prompt tokens ...
        slo_tpot_s: ... and TPOT within this
    """

    trace: str
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    out: str = "build/loadgen/records.jsonl.gz"
    name: str = "run"
    html: str | None = None
    json: str | None = None
    skip_bad_rows: bool = False
    first_row: NonNegativeInt = 0
    rows_count: PositiveInt | None = None
    whole_conversations: bool = True
    turns_min: PositiveInt = 1
    prompt_tokens_max: PositiveInt | None = None
    requests_max: PositiveInt | None = None
    prompt_length_factor: PositiveFloat = 1.0
    output_length_factor: PositiveFloat = 1.0
    arrivals: Literal["trace", "poisson", "constant"] = "trace"
    request_rate: PositiveFloat | None = None
    wait_for_previous_turn: bool = False
    pace: Pace = "timestamps"
    in_flight_max: PositiveInt = 1024
    seed: NonNegativeInt = 0
    vocabulary_tokens: VocabularySize = 4096  # type: ignore[valid-type]  # made at run time
    token_seed: NonNegativeInt = 0
    headers: dict[str, str] = field(default_factory=dict)
    api_key: str | None = None
    connect_timeout_s: PositiveFloat = 10.0
    request_timeout_s: PositiveFloat = 600.0
    slo_ttft_s: PositiveFloat = 1.0
    slo_ttft_per_1000_prompt_tokens_s: PositiveFloat = 0.0625
    slo_tpot_s: PositiveFloat = 0.05


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Write a generated workload as a trace file.

    chat: shaped by published chat traces. chat_mix, api_mix: with the reuse of "KVCache Cache in
    the Wild" (62 % and 54 %). hot_prefix: one prefix much hotter than its holders can bear, or
    not. agents: long sessions over a shared tool-and-system prefix. See docs/traces.md.

    Args:
        out: trace file to write (.jsonl, .jsonl.gz)
        workload: which one
        requests_count: rows
        session_rate: chat: new sessions per second; each has about 1.5 requests
        system_prompts_count: chat: distinct system prompts, of zipf popularity
        turns_max: chat: most turns of a session
        prompt_tokens_max: chat: longest prompt
        block_size_tokens: chat: grain of the block ids
        mix_session_rate: chat_mix, api_mix: sessions per second; their own (1 and 20) unless given
        hot_prefix: options of hot_prefix
        agents: options of agents
        seed: equal options and seed give an equal file
    """

    out: str
    workload: Literal["chat", "chat_mix", "api_mix", "hot_prefix", "agents"] = "chat"
    requests_count: PositiveInt = 1000
    session_rate: PositiveFloat = 2.2
    system_prompts_count: PositiveInt = 12
    turns_max: PositiveInt = 32
    prompt_tokens_max: PositiveInt = 126_000
    block_size_tokens: PositiveInt = 128
    mix_session_rate: PositiveFloat | None = None
    hot_prefix: HotPrefix = field(default_factory=HotPrefix)
    agents: AgentSessions = field(default_factory=AgentSessions)
    seed: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """Write any readable trace in the Timestable format, in order of arrival.

    Formats, told apart by their fields: Timestable, Mooncake, Bailian, Azure 2023, weka, tau-bench,
    LMCache agents, ragpulse (trace and components), ServeGen (rates and lengths). Several traces
    are mixed, their blocks and sessions kept apart. See docs/traces.md.

    Args:
        traces: the files, before or after the options (.jsonl, .jsonl.gz, .jsonl.zst)
        output: trace file to write (.jsonl, .jsonl.gz)
        prompts: azure, servegen: unique = no prompt shares a token, reuse = each begins with ...
        reuse_ratio: ... this share of it in common with its group
        reuse_groups_count: azure: groups, of zipf popularity; in servegen a client is a group
        block_size_tokens: grain of block ids where the trace has none
        text_as: lmcache, tau-bench: block ids of the text, or the text itself
        chars_per_token: lmcache, tau-bench: characters of text per token
        session_rate: weka, tau-bench: sessions that begin per second; lmcache: instead of its own
        shared_prefix: weka: sessions with equal tool and system parts share them
        tool_think_s: tau-bench: mean pause before a call that answers a tool
        user_think_s: tau-bench: mean pause before a call that answers a person
        ttft_s: tau-bench: assumed time to first token
        tpot_s: tau-bench: assumed time per further token
        from_s: leave out what arrives before
        duration_s: and what arrives this long after from_s, or later
        rows_max: read no more requests than this
        lines_max: read no more lines of requests than this; conversations, in weka and tau-bench
        seed: equal options and seed give an equal file
    """

    traces: list[str]
    output: str
    prompts: PromptMaking | None = None
    reuse_ratio: ClosedUnitInterval = 0.5
    reuse_groups_count: PositiveInt = 20
    block_size_tokens: PositiveInt = 64
    text_as: Literal["blocks", "text"] = "blocks"
    chars_per_token: PositiveFloat = 4.0
    session_rate: PositiveFloat | None = None
    shared_prefix: bool = True
    tool_think_s: PositiveFloat = 1.0
    user_think_s: PositiveFloat = 20.0
    ttft_s: PositiveFloat = 0.5
    tpot_s: PositiveFloat = 0.03
    from_s: NonNegativeFloat = 0.0
    duration_s: PositiveFloat | None = None
    rows_max: PositiveInt | None = None
    lines_max: PositiveInt | None = None
    seed: NonNegativeInt = 0


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Compare saved runs: a table, and on request HTML with plots and JSON.

    Args:
        records: record files of the replay command, separated by commas, in the order of columns
        title: heading
        html: write an HTML report to this file
        json: write the figures as JSON to this file
        slo_ttft_s: goodput wants TTFT within this ...
        slo_ttft_per_1000_prompt_tokens_s: ... plus this per 1,000 prompt tokens ...
        slo_tpot_s: ... and TPOT within this
    """

    records: str
    title: str = "Load test"
    html: str | None = None
    json: str | None = None
    slo_ttft_s: PositiveFloat = 1.0
    slo_ttft_per_1000_prompt_tokens_s: PositiveFloat = 0.0625
    slo_tpot_s: PositiveFloat = 0.05


@dataclass(frozen=True, kw_only=True)
class ConsistencyConfig:
    """Compare 1, 2, 4 and 8 routers in virtual time; watch a cold instance join.

    Exit status: 0, 1 when a verdict fails, 2 for a bad option.

    Args:
        output: JSON file of all figures and verdicts
        quick: one seed, few requests, 1 and 8 routers, a bound of 25 % instead of 3 %
        requests_count: requests of a cell after the warm-up
        seeds_count: seeds of a cell
        capacity: requests per second that count as load 100 %
        find_capacity: find that by bisection first, minutes
    """

    output: str = "build/consistency/summary.json"
    quick: bool = False
    requests_count: PositiveInt | None = None
    seeds_count: PositiveInt | None = None
    capacity: PositiveFloat | None = None
    find_capacity: bool = False


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Compare policies over workloads, loads and fleets in virtual time: the policy lab.

    Runs what the scenario says with the router's own policies over simulated engines; finished runs
    are kept, so an aborted matrix goes on where it was. Writes summary.json and report.html. See
    docs/policy_lab.md.

    Exit status: 0, 2 for a bad option, scenario or trace, 130 after Ctrl-C.

    Args:
        scenario: name of a shipped scenario (default, matrix, tier, disaggregated, detector,
            staleness, sensitivity, reports, eviction, eviction_routing, full) or path of one
        output: folder of the results
        traces: folder of traces; $TIMESTABLE_TRACES, else ../shared/traces; a workload whose files
            are missing there is generated
        policies: instead of the scenario's, e.g. '[lmetric, vllm_v1]'
        workloads: only these
        loads: instead of the scenario's, fractions of capacity
        seeds: instead of the scenario's
        evictions: policies of the engines' caches, instead of the scenario's, e.g. '[lru, belady]'
        processes: at a time; as many as there are cores unless given
        fresh: run everything anew
    """

    scenario: str = "default"
    output: str = "build/simulate"
    traces: str | None = None
    policies: list[str] | None = None
    workloads: list[str] | None = None
    loads: list[PositiveFloat] | None = None
    seeds: list[NonNegativeInt] | None = None
    evictions: list[str] | None = None
    processes: PositiveInt | None = None
    fresh: bool = False


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Find the highest rate that a fleet bears with a policy, by bisection in virtual time.

    Exit status: 0, 1 when a workload has no such rate, 2 for a bad option, scenario or trace.

    Args:
        scenario: name of a shipped scenario or path of a TOML file; its first fleet is used
        traces: folder of traces, as for simulate
        policies: to compare; the scenario's capacity_policy unless given
        workloads: only these
        ttft_p99_s: bound on the 99th percentile of TTFT
        tpot_mean_s: bound on the mean TPOT
        slo_ratio: share of requests that have to be within the workload's SLO, instead of the
            other two
        processes: at a time; as many as there are cores unless given
    """

    scenario: str = "default"
    traces: str | None = None
    policies: list[str] | None = None
    workloads: list[str] | None = None
    ttft_p99_s: PositiveFloat = 10.0
    tpot_mean_s: PositiveFloat = 0.1
    slo_ratio: ClosedUnitInterval | None = None
    processes: PositiveInt | None = None


Config = (
    ReplayConfig
    | GenerateConfig
    | ConvertConfig
    | AnalyzeConfig
    | ReportConfig
    | ConsistencyConfig
    | SimulateConfig
    | CapacityConfig
)


def parse(arguments: Sequence[str]) -> Config:
    """The command and its options from the command line, TIMESTABLE_LOADGEN_* and --config.

    Exits with status 2 and a message that names the option when something is wrong.
    """
    config: Config = auto_cli(
        {
            "replay": ReplayConfig,
            "generate": GenerateConfig,
            "convert": ConvertConfig,
            "analyze": AnalyzeConfig,
            "report": ReportConfig,
            "consistency": ConsistencyConfig,
            "simulate": SimulateConfig,
            "capacity": CapacityConfig,
        },
        prog="python -m loadgen",
        description=_DESCRIPTION,
        default_env=True,
        env_prefix="TIMESTABLE_LOADGEN",
        as_positional=False,
        args=[f"{a}=true" if a in _SWITCHES else a for a in _traces_named(arguments)],
    )
    return config


def _traces_named(arguments: Sequence[str]) -> list[str]:
    """`convert A B --output C` as `convert --output C --traces ["A", "B"]`."""
    if not arguments or arguments[0] not in ("convert", "analyze"):
        return list(arguments)
    files: list[str] = []
    options: list[str] = []
    takes_value = False
    for argument in arguments[1:]:
        is_option = argument.startswith("-")
        (options if is_option or takes_value else files).append(argument)
        takes_value = is_option and "=" not in argument and argument not in ("-h", "--help")
    named = [f"--traces={json.dumps(files)}"] if files else []
    return [arguments[0], *options, *named]
