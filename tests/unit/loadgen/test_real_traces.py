"""The readers on published traces, against the figures known of them.

The files are too large for the repository. They are looked for in $TIMESTABLE_TRACES, else in
`shared/traces` beside the checkout; without them these tests are skipped, and `test_trace_formats`
still reads a sample of every format.
"""

import json
import os
from gzip import open as open_gzip
from pathlib import Path

import pytest

from loadgen.simulation.lab.scenario import TRACES_VARIABLE
from loadgen.slicing import ideal_hit_ratio
from loadgen.trace import TraceRow
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import EVERYTHING, Span, read_rows

BESIDE = Path(__file__).parents[4] / "shared" / "traces"
TRACES = Path(os.environ.get(TRACES_VARIABLE) or BESIDE)

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="no folder shared/traces is beside this checkout"
)


def _read(*names: str, options: ReadOptions, span: Span = EVERYTHING) -> list[TraceRow]:
    return list(read_rows([TRACES / name for name in names], options, span))


def _means(rows: list[TraceRow]) -> tuple[int, float, float]:
    count = len(rows)
    prompts = sum(row.prompt_tokens for row in rows) / count
    return count, round(prompts), round(sum(row.output_tokens for row in rows) / count, 1)


@pytest.mark.parametrize(
    ("name", "means", "reuse"),
    [("conversation", (8423, 12308, 346.4), 0.36), ("synthetic", (2795, 13358, 180.8), 0.469)],
)
def test_mooncake_has_its_lengths_and_reuse(
    name: str, means: tuple[int, float, float], reuse: float
) -> None:
    """Rows, mean lengths and the reuse of an infinite cache, by tokens."""
    rows = _read(f"mooncake_{name}.jsonl.gz", options=ReadOptions())
    assert means == _means(rows)
    assert ideal_hit_ratio(rows) == pytest.approx(reuse, abs=0.002)


@pytest.mark.parametrize(
    ("name", "means", "span_s"),
    [("code", (6173, 2043, 27.2), 1982), ("conv", (13556, 1208, 200.5), 2285)],
)
def test_azure_has_its_lengths_and_span(
    name: str, means: tuple[int, float, float], span_s: int
) -> None:
    """With unique prompts nothing is reused."""
    rows = _read(f"azure_llm_2023_{name}.jsonl.gz", options=ReadOptions(prompts="unique"))
    assert (means, span_s) == (_means(rows), round(rows[-1].arrival_s))
    assert ideal_hit_ratio(rows) == 0


def test_stated_reuse_of_azure_is_what_an_ideal_cache_hits() -> None:
    """Less what blocks cut off and what each group computes once."""
    options = ReadOptions(prompts="reuse", reuse_ratio=0.6, block_size_tokens=16)
    rows = _read("azure_llm_2023_conv.jsonl.gz", options=options)
    assert ideal_hit_ratio(rows) == pytest.approx(0.585, abs=0.02)


def test_tau_bench_has_1741_calls_over_one_system_message() -> None:
    """140 conversations; all begin with the blocks of 6,155 characters."""
    rows = _read("tau_bench_airline_gpt4o.jsonl.gz", options=ReadOptions(session_rate=0.1))
    assert (len(rows), len({row.session_id for row in rows})) == (1741, 140)
    shared_blocks = 6155 // (64 * 4)
    assert len({row.block_ids[:shared_blocks] for row in rows}) == 1


@pytest.mark.parametrize(
    ("name", "calls", "conversations", "reuse"),
    [("miniswe", 302, 14, 0.936), ("magagent", 542, 17, 0.833)],
)
def test_lmcache_reuses_within_conversations(
    name: str, calls: int, conversations: int, reuse: float
) -> None:
    """At least the published share by characters within a conversation, less a block's grain."""
    options = ReadOptions(block_size_tokens=16)
    rows = _read(f"lmcache_agent_{name}.jsonl.gz", options=options)
    assert (calls, conversations) == (len(rows), len({row.session_id for row in rows}))
    assert ideal_hit_ratio(rows) > reuse - 0.02


def test_ragpulse_reuses_32_percent_as_a_leading_run() -> None:
    """The published share of tokens found as a leading run, less a block's grain."""
    rows = _read(
        "ragpulse_trace.jsonl.gz",
        "ragpulse_components.jsonl.gz",
        options=ReadOptions(block_size_tokens=16),
    )
    rows.sort(key=lambda row: row.arrival_s)
    assert _means(rows) == (4982, 2938, 277.2)
    assert ideal_hit_ratio(rows) == pytest.approx(0.316, abs=0.006)


@pytest.mark.parametrize("model", ["deepseek_r1", "m_large"])
def test_servegen_sends_the_rates_of_its_clients(model: str) -> None:
    """One window: as many requests as the rates of all clients add up to."""
    with open_gzip(TRACES / f"servegen_{model}_rates.jsonl.gz") as file:
        rates = [json.loads(line) for line in file]
    expected = 600 * sum(row["rate"] for row in rates if row["timestamp"] == 1200)
    rows = _read(
        f"servegen_{model}_rates.jsonl.gz",
        f"servegen_{model}_lengths.jsonl.gz",
        options=ReadOptions(prompts="unique"),
        span=Span(from_s=1200.0, duration_s=600.0),
    )
    assert expected > 1000
    assert len(rows) == pytest.approx(expected, abs=30)


def test_weka_reuses_most_within_sessions_and_shares_tools_between() -> None:
    """The first conversations: the first prompt aside, nearly all tokens were seen before."""
    options = ReadOptions(session_rate=1.0)
    rows = _read("weka_agentic_coding.jsonl.zst", options=options, span=Span(lines_max=4))
    main = [row for row in rows if row.category == "main"]
    assert (len({row.session_id for row in main}), rows[0].block_size_tokens) == (4, 64)
    assert ideal_hit_ratio(rows) == pytest.approx(0.96, abs=0.03)
