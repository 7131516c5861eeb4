"""Tables, summary and page of the policy lab, of runs with known figures."""

import json
import re
from html import unescape
from math import isnan, nan
from pathlib import Path

import pytest
from lab_runs import drawn_run, lab_run
from plotly import graph_objects
from rich.console import Console
from rich.table import Table

from loadgen.errors import RecordsError
from loadgen.simulation.lab.figures import RunFigures, RunKey
from loadgen.simulation.lab.report.cells import Matrix, Shape, baseline_of, difference
from loadgen.simulation.lab.report.charts import workload_charts
from loadgen.simulation.lab.report.claims import judge
from loadgen.simulation.lab.report.console import (
    console_claims,
    console_comparison,
    console_overview,
)
from loadgen.simulation.lab.report.markdown import markdown_tables
from loadgen.simulation.lab.report.page import page, write_page
from loadgen.simulation.lab.report.summary import read_summary, summary_json, write_summary
from loadgen.simulation.lab.report.tables import COLUMNS, comparison, overview

SHAPE = Shape(instances=16, routers=1, staleness_s=0.0)
TTFT = COLUMNS[0]
ISSUE_KEYS = {
    *("workload", "load", "policy", "instances", "routers", "staleness_s"),
    *("ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s"),
    *("goodput_rps", "hit_ratio", "imbalance", "requests"),
}


def some_runs() -> list[RunFigures]:
    """Two workloads, two loads, three policies, two seeds; one tier; stale routers."""
    runs = []
    for workload in ("chat", "agents"):
        for load in (0.5, 1.1):
            for seed in (1, 2):
                base = {"workload": workload, "load": load, "seed": seed}
                runs += [
                    lab_run("vllm_v1", **base, ttft_mean_s=0.3),
                    lab_run("lmetric", **base),
                    lab_run("a<b>", **base, ttft_mean_s=0.1 * seed, hit_ratio=0.7),
                    lab_run("lmetric", **base, variant="tier", ttft_mean_s=0.15),
                ]
    for staleness_s in (0.0, 1.0):
        runs.append(lab_run(routers=4, staleness_s=staleness_s, ttft_mean_s=0.2 + staleness_s))
    return runs


def shown(table: Table, width: int = 100) -> str:
    """A table as a console of this width prints it."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_seeds_make_a_mean_and_a_spread() -> None:
    """0.1 and 0.2 s: mean 0.15 s, sample deviation 0.0707 of it; one seed has no spread."""
    matrix = Matrix.of(some_runs())
    cells = {cell.series: cell for cell in matrix.at("chat", 0.5, SHAPE)}
    assert list(cells) == ["lmetric", "vllm_v1", "a<b>", "lmetric (tier)"]
    assert cells["a<b>"].mean("ttft_mean_s") == pytest.approx(0.15)
    assert cells["a<b>"].spread("ttft_mean_s") == pytest.approx(0.0707107 / 0.15)
    assert isnan(Matrix.of([lab_run()]).cells[0].spread("ttft_mean_s"))


def test_a_run_again_replaces_the_one_before() -> None:
    """A resumed matrix has no run twice, and a seed without a figure does not spoil the mean."""
    matrix = Matrix.of([lab_run(ttft_mean_s=9.0), lab_run(), lab_run(seed=2, ttft_mean_s=nan)])
    assert matrix.cells[0].mean("ttft_mean_s") == pytest.approx(0.2)


def test_policies_are_compared_with_lmetric_in_their_own_variant() -> None:
    """And a variant of lmetric with the plain one, which tells what the variant brings."""
    cells = Matrix.of(
        [lab_run(p, variant=v) for p in ("lmetric", "smetric") for v in ("", "tier")]
    ).cells
    chosen = {cell.series: baseline_of(cell, cells) for cell in cells}
    assert {name: one and one.series for name, one in chosen.items()} == {
        "lmetric": "lmetric",
        "lmetric (tier)": "lmetric",
        "smetric": "lmetric",
        "smetric (tier)": "lmetric (tier)",
    }
    assert isnan(difference(cells[0], None, "ttft_mean_s"))


def test_best_of_a_column_and_the_difference_to_lmetric() -> None:
    """Lowest TTFT, highest hit ratio; nobody is best where all read the same, or alone."""
    rows = {row.series: row for row in comparison(Matrix.of(some_runs()).at("chat", 0.5, SHAPE))}
    entries = {name: dict(zip(COLUMNS, row.entries, strict=True)) for name, row in rows.items()}
    assert [name for name in rows if entries[name][TTFT].best] == ["a<b>"]
    found = entries["a<b>"][TTFT]
    assert (found.text, found.difference, found.good, found.spread) == ("150", "-25 %", 1, "47 %")
    assert (entries["vllm_v1"][TTFT].difference, entries["vllm_v1"][TTFT].good) == ("+50 %", -1)
    assert entries["lmetric"][TTFT].difference == ""
    hits = next(column for column in COLUMNS if column.figure == "hit_ratio")
    assert [name for name in rows if entries[name][hits].best] == ["a<b>"]
    assert entries["a<b>"][hits].good == 1
    goodput = next(column for column in COLUMNS if column.figure == "goodput_rps")
    assert not any(entries[name][goodput].best for name in rows)


def test_overview_has_all_places_and_their_geometric_mean() -> None:
    """vllm_v1 is at +50 % in all four places; half and double would cancel."""
    found = overview(Matrix.of(some_runs()), SHAPE, TTFT)
    assert found.places == (("chat", 0.5), ("chat", 1.1), ("agents", 0.5), ("agents", 1.1))
    rows = {row.series: [entry.text for entry in row.entries] for row in found.rows}
    assert rows["vllm_v1"] == ["+50 %"] * 5
    assert "lmetric" not in rows
    runs = [lab_run(load=load) for load in (0.5, 0.9)]
    runs += [lab_run("x", load=0.5, ttft_mean_s=0.1), lab_run("x", load=0.9, ttft_mean_s=0.4)]
    [row] = overview(Matrix.of(runs), SHAPE, TTFT).rows
    assert [entry.value for entry in row.entries] == pytest.approx([-0.5, 1.0, 0.0], abs=1e-9)


def test_console_tables_keep_every_number_whole_in_80_columns() -> None:
    """Names and figures as they are, brackets are no markup; lost requests only where any are."""
    runs = [*some_runs(), lab_run("[red]x[/]", ttft_mean_s=81.2345)]
    text = shown(console_comparison("chat", 0.5, Matrix.of(runs).at("chat", 0.5, SHAPE)), 80)
    assert "…" not in text
    assert "lost" not in text
    assert "[red]x[/]" in text
    assert "81.2s" in text
    assert "x406" in text
    some_lost = Matrix.of([lab_run(lost=3)])
    assert "lost" in shown(console_comparison("chat", 0.5, some_lost.at("chat", 0.5, SHAPE)))
    text = shown(console_overview(Matrix.of(some_runs()), SHAPE, TTFT), 80)
    assert re.search(r"agents 110 % +\+50 +-25 +-25", text), text
    assert "partly" in shown(console_claims(judge(Matrix.of(some_runs()))))


def test_summary_has_the_keys_that_are_promised(tmp_path: Path) -> None:
    """Named as agreed, seconds unrounded to six digits, null for NaN; it reads back."""
    runs = [lab_run(), lab_run("x", ttft_mean_s=nan, ttft_quantiles_s=())]
    path = tmp_path / "deep" / "summary.json"
    write_summary(path, runs)
    parsed = json.loads(path.read_text())
    assert list(parsed) == ["runs"]
    assert set(parsed["runs"][0]) >= ISSUE_KEYS
    assert (parsed["runs"][0]["ttft_mean_s"], parsed["runs"][1]["ttft_mean_s"]) == (0.2, None)
    back = read_summary(path)
    assert summary_json(back) == summary_json(runs)
    assert isinstance(back[0].requests, int)
    assert isnan(back[1].ttft_mean_s)
    assert back[1].ttft_quantiles_s == ()
    assert [one.name for one in path.parent.iterdir()] == ["summary.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"runs": 1}', '{"runs": [1]}', '{"runs": [{"load": "x"}]}', "\xff"]
)
def test_a_file_that_is_no_summary_is_told_so(tmp_path: Path, text: str) -> None:
    """One kind of error, that names the file."""
    path = tmp_path / "summary.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(RecordsError, match=re.escape(str(path))):
        read_summary(path)
    with pytest.raises(RecordsError, match="cannot be read"):
        read_summary(tmp_path / "absent.json")


def test_a_later_version_s_keys_are_ignored(tmp_path: Path) -> None:
    """And its known ones are kept."""
    parsed = json.loads(summary_json([lab_run()]))
    parsed["runs"][0]["a_new_one"] = 1
    (tmp_path / "s.json").write_text(json.dumps(parsed))
    assert summary_json(read_summary(tmp_path / "s.json")) == summary_json([lab_run()])


def test_plots_are_what_plotly_knows() -> None:
    """Every trace and layout is valid; distributions and imbalance are there for each load."""
    charts = list(workload_charts(Matrix.of(some_runs()), "chat", SHAPE, "w0"))
    assert [chart.identity.removeprefix("w0-") for chart in charts] == [
        "ttft",
        "tpot",
        "goodput",
        "hits",
        "imbalance",
    ]
    for chart in charts:
        for traces in chart.traces.values():
            graph_objects.Figure(data=traces, layout=chart.layout)
    ttft, _, goodput, hits, imbalance = charts
    assert list(ttft.traces) == list(imbalance.traces) == ["0.5", "1.1"]
    assert [trace["name"] for trace in ttft.traces["0.5"]] == [
        "lmetric",
        "vllm_v1",
        "a<b>",
        "lmetric (tier)",
    ]
    assert ttft.traces["0.5"][0]["x"][0] == pytest.approx(0.1)
    assert ttft.layout["xaxis"]["ticktext"] == ["100 ms", "200 ms", "500 ms", "1 s", "2 s", "5 s"]
    offered, lmetric, *_ = goodput.traces[""]
    assert (offered["x"], offered["y"], offered["meta"]) == ([50, 110], [9.5, 9.5], -1)
    assert (lmetric["name"], lmetric["y"], lmetric["meta"]) == ("lmetric", [9, 9], 0)
    assert hits.traces[""][2]["y"] == [70, 70]


def test_nothing_measured_is_no_plot() -> None:
    """A run that served nobody has a goodput of nought, and no distribution."""
    run = lab_run(ttft_quantiles_s=(), tpot_quantiles_s=(), imbalance_over_time=(), hit_ratio=nan)
    charts = list(workload_charts(Matrix.of([run]), "chat", SHAPE, "w0"))
    assert [chart.identity for chart in charts] == ["w0-goodput", "w0-hits"]
    assert charts[1].traces[""][0]["y"] == [None]
    assert 'id="w0-hits"' in page("t", [run], {})


def test_the_page_is_one_file_that_needs_no_network(tmp_path: Path) -> None:
    """plotly.js is inside once, nothing is loaded, names are escaped, all workloads are there."""
    path = tmp_path / "deep" / "index.html"
    whys = {"vllm_ttft": "Why <i>?"}
    write_page(path, "A & B", some_runs(), {"seed": "<7>"}, agents={"agents"}, whys=whys)
    html = path.read_text()
    assert html.count("plotly.js v") == 1
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", html)
    for text in ("A &amp; B", "&lt;7&gt;", "a&lt;b&gt;", "Why &lt;i&gt;?"):
        assert text in html
    assert "a<b>" not in html
    assert [unescape(one) for one in re.findall(r"<h2[^>]*>(.*?)</h2>", html)] == [
        "What was run",
        "Every policy against lmetric",
        "The papers' claims, and ours beside them",
        "chat",
        "agents",
        "Several fleets: routers, and how stale their view is",
        "What the words mean",
    ]
    assert "4 routers, 1 s stale" in html
    assert "within 20 ms for agents" in html
    assert "lost</button>" not in html
    assert "lost</button>" in page("t", [lab_run(lost=1)], {})


def test_a_page_of_one_run_has_no_fleets_to_compare() -> None:
    """And nothing else is missing: no baseline, no second policy, no second load."""
    html = page("t", [lab_run("vllm_v1")], {})
    assert 'id="fleets"' not in html
    assert 'id="w0-ttft"' in html


def test_the_default_matrix_fits_a_page_of_six_megabytes() -> None:
    """Six workloads, three loads, seven policies; quantiles as of drawn requests."""
    key = RunKey(
        workload="chat",
        load=0.5,
        policy="lmetric",
        instances=16,
        routers=1,
        staleness_s=0.0,
        seed=1,
    )
    one = drawn_run(key)
    drawn = {
        "ttft_quantiles_s": one.ttft_quantiles_s,
        "tpot_quantiles_s": one.tpot_quantiles_s,
        "imbalance_over_time": one.imbalance_over_time,
    }
    assert len(one.imbalance_over_time) == 60
    runs = [
        lab_run(f"policy_{policy}", workload=f"workload_{workload}", load=load, **drawn)
        for workload in range(6)
        for load in (0.5, 0.9, 1.1)
        for policy in range(7)
    ]
    assert len(page("t", runs, {}).encode()) < 6_000_000


def test_markdown_has_every_cell_once_and_survives_any_name() -> None:
    """A heading and a row per policy for each workload, load and fleet; the claims before them."""
    matrix = Matrix.of(some_runs())
    text = markdown_tables(matrix, judge(matrix))
    assert text.count("### chat, load 50 %") == text.count("### chat, load 110 %") + 2 == 3
    rows = [line for line in text.splitlines() if line.startswith("| a<b> |")]
    assert len(rows) == 4
    assert text.index("The papers' claims") < text.index("### chat")
    assert "load 50 % (10 requests/s; in the window 9.5, +2.0 % in its second half)" in text
    assert text.count("TTFT, second half / first (x)") == text.count("requests/s; in the window")
    best = next(line for line in rows if "**" in line)
    assert best.count("|") == rows[0].count("|")
