"""Options of the commands; each field is one option of the command line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jsonargparse import auto_cli
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt, restricted_number_type

from loadgen.tokens import VOCABULARY_TOKENS_MAX

VocabularySize = restricted_number_type(
    "VocabularySize", int, [(">=", 2), ("<=", VOCABULARY_TOKENS_MAX)]
)

_SWITCHES = ("--quick", "--find_capacity")
"""Options that may stand without a value."""

_DESCRIPTION = """
Measure a fleet through any OpenAI-compatible URL: replay a trace or a generated workload open loop,
keep every token's arrival, and report TTFT, TPOT, goodput and hit ratio. To begin, make a workload
with "generate --out chat.jsonl.gz" and run it with "replay --trace chat.jsonl.gz --url URL".
"""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Replay a trace against a URL; prints the figures and keeps the raw records.

    Exit status: 0, 1 when no request succeeded, 2 for a bad option or file, 130 after Ctrl-C (what
    was measured until then is kept).

    Args:
        trace: trace file, Mooncake or Timestable format (.jsonl, .jsonl.gz); see loadgen/trace.py
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
    """Write a generated chat workload, shaped by published statistics, as a trace file.

    Args:
        out: trace file to write (.jsonl, .jsonl.gz)
        requests_count: rows
        session_rate: new sessions per second; each has about 1.5 requests
        system_prompts_count: distinct system prompts, of zipf popularity
        turns_max: most turns of a session
        prompt_tokens_max: longest prompt
        block_size_tokens: grain of the block ids
        seed: equal options and seed give an equal file
    """

    out: str
    requests_count: PositiveInt = 1000
    session_rate: PositiveFloat = 2.2
    system_prompts_count: PositiveInt = 12
    turns_max: PositiveInt = 32
    prompt_tokens_max: PositiveInt = 126_000
    block_size_tokens: PositiveInt = 128
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


Config = ReplayConfig | GenerateConfig | ReportConfig | ConsistencyConfig


def parse(arguments: Sequence[str]) -> Config:
    """The command and its options from the command line, TIMESTABLE_LOADGEN_* and --config.

    Exits with status 2 and a message that names the option when something is wrong.
    """
    config: Config = auto_cli(
        {
            "replay": ReplayConfig,
            "generate": GenerateConfig,
            "report": ReportConfig,
            "consistency": ConsistencyConfig,
        },
        prog="python -m loadgen",
        description=_DESCRIPTION,
        default_env=True,
        env_prefix="TIMESTABLE_LOADGEN",
        as_positional=False,
        args=[f"{a}=true" if a in _SWITCHES else a for a in arguments],
    )
    return config
