"""Scenarios of the policy lab: what they may say, what comes of them, what is kept of a run."""

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from math import nan
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.errors import LoadgenError
from loadgen.simulation.lab import matrix
from loadgen.simulation.lab.capacity import Bounds, Found, find_capacity
from loadgen.simulation.lab.cells import Cell, measure
from loadgen.simulation.lab.command import Selection, capacity, simulate
from loadgen.simulation.lab.matrix import Workers, digest
from loadgen.simulation.lab.policy_names import policy_of
from loadgen.simulation.lab.scenario import (
    Fleet,
    ScenarioError,
    Traces,
    WorkloadSpec,
    load_scenario,
)
from loadgen.simulation.lab.workloads import at_rate, base_rows
from loadgen.trace import write_trace
from router.policies.smetric import SMetric

NO_TRACES = Traces(folder=Path("/nonexistent"))
SMALL = """
policies = ["lmetric", "round_robin"]
loads = [0.5, 1.1]

[[fleets]]
instances = 2

[[workloads]]
name = "mix"
generate = "chat_mix"
duration_s = 4
stretch = "time"
capacity_rps = 10.0
"""

CELL = Cell(
    workload=WorkloadSpec(name="m", generate="chat_mix", duration_s=20, stretch="time"),
    traces=NO_TRACES,
    fleet=Fleet(instances=1),
    policy="lmetric",
    load=1.0,
    rate=1.0,
    seed=1,
)

ODD_BLOCKS = """
{"arrival_s": %d, "prompt_tokens": 9, "output_tokens": 2, "block_size_tokens": 24, "block_ids": [1]}
""".strip()


def scenario_file(folder: Path, text: str = SMALL) -> str:
    """Its path."""
    path = folder / "small.toml"
    path.write_text(text)
    return str(path)


def quiet() -> Console:
    """Prints nothing."""
    return Console(quiet=True)


SHIPPED = sorted(
    entry.name.removesuffix(".toml")
    for entry in (files("loadgen") / "scenarios").iterdir()
    if entry.name.endswith(".toml")
)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scenarios_name_policies_and_workloads_that_exist(name: str) -> None:
    """Every workload can be made without any trace; loads are stated against a known capacity.

    Arrivals last for a minute at the highest load.
    """
    scenario = Selection(scenario=name).chosen()
    for workload in scenario.workloads:
        rate = max(scenario.loads) * (workload.capacity_rps or 0.0)
        assert workload.requests_count(rate) > 59 * rate, workload.name  # else an overload's start
        assert workload.capacity_rps, workload.name
        assert workload.trace_capacity_rps or not workload.trace, workload.name
        rows = base_rows(workload, NO_TRACES, requests_count=30, seed=1)
        assert len(at_rate(rows, workload, 5.0)) == 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("chat_mix", "chatmix"), "workloads.0.generate"),
        (("duration_s", "durations"), "workloads.0.durations"),
        (("0.5, 1.1", "-1"), "loads.0"),
        (('policies = ["lmetric", "round_robin"]', "policies = []"), "policies"),
        (("[[fleets]]", "[[fleets"), "no TOML"),
        (("instances = 2", "instances = 2\n[[fleets]]\ninstances = 2"), "fleets named twice"),
        (("0.5, 1.1", "0.5, 0.5"), "loads named twice: 0.5"),
        (("instances = 2", 'profile = "none"'), "fleets: no profile named 'none'"),
        (
            ("instances = 2", "staleness_s = 1\ndetects_hot_prefixes = true"),
            "fleets.0.*detects_hot_prefixes needs",
        ),
        (("duration_s = 4", "warm_up_ratio = 1.0"), "workloads.0.warm_up_ratio"),
        (('"round_robin"', '"roundrobin"'), "unknown policy `roundrobin`"),
        (('"round_robin"', '"smetric[slak=2]"'), "no parameter `slak`; it has slack"),
        (('"round_robin"', '"round_robin[a=2]"'), "no parameter `a`; it has none"),
        (('"round_robin"', '"smetric[slack=x]"'), "`x` is no number"),
        (('"round_robin"', '"smetric[slack=2"'), "is no policy"),
    ],
)
def test_a_wrong_scenario_is_refused_by_the_field(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    """The message names file and field."""
    path = scenario_file(tmp_path, SMALL.replace(*change))
    with pytest.raises(ScenarioError, match=message):
        Selection(scenario=path).chosen()


def test_a_policy_may_have_other_parameters() -> None:
    """The router's rule with those, under the name that asked for them."""
    name = "smetric[slack=2,eviction_ratio=0.25]"
    assert policy_of(name) == SMetric(name, slack=2.0, eviction_ratio=0.25)
    assert policy_of("smetric") == SMetric()


def test_how_often_engines_report_is_told_by_the_results() -> None:
    """Fleets that differ in nothing else are told apart; the usual interval is not mentioned."""
    variants = [
        replace(CELL, fleet=Fleet(variant="tier", report_interval_s=seconds)).key.variant
        for seconds in (0.1, 5.0)
    ]
    assert variants == ["tier", "tier reports every 5 s"]


def test_what_there_is_not_is_named_with_what_there_is() -> None:
    """A scenario by a wrong name; a workload that the scenario does not have."""
    with pytest.raises(ScenarioError, match=r"shipped ones: .*default"):
        load_scenario("usual")
    with pytest.raises(ScenarioError, match=r"has no nothing; it has .*hot_prefix"):
        Selection(scenario="default", workloads=["nothing"]).chosen()
    with pytest.raises(ScenarioError, match="seeds: one is named twice"):
        Selection(scenario="default", seeds=[1, 2, 1]).chosen()


def test_a_trace_is_taken_where_it_is_and_its_twin_where_not(tmp_path: Path) -> None:
    """The same specification reads the file or generates."""
    spec = WorkloadSpec(name="w", trace=("t.jsonl",), generate="chat_mix")
    twin = base_rows(spec, Traces(folder=tmp_path), requests_count=20, seed=1)
    write_trace(tmp_path / "t.jsonl", twin[:7])
    assert len(base_rows(spec, Traces(folder=tmp_path), requests_count=20, seed=1)) == 7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"garbage": 1}', r"t\.jsonl, line 1: unknown trace format"),
        (ODD_BLOCKS, "workload mix: row 0: blocks of 24 tokens cannot be cut"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told_by_the_processes(
    tmp_path: Path, line: str, message: str
) -> None:
    """The error is the one that was raised there, not that a process has died."""
    text = SMALL.replace("capacity_rps", 'trace = ["t.jsonl"]\ntrace_capacity_rps')
    lines = [line % place if "%d" in line else line for place in range(4)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    selection = Selection(scenario=scenario_file(tmp_path, text), traces=str(tmp_path))
    with pytest.raises(LoadgenError, match=message):
        simulate(selection, tmp_path / "out", quiet(), processes=1)


def test_sessions_are_cut_short_and_pauses_capped() -> None:
    """What comes after a capped pause comes earlier; nothing arrives before what it follows."""
    spec = WorkloadSpec(name="a", generate="agents", turns_max=3, think_max_s=5.0)
    rows = base_rows(spec, NO_TRACES, requests_count=60, seed=1)
    assert max(row.turn or 0 for row in rows) == 2
    assert max(row.think_s or 0 for row in rows) == 5.0
    last_s: dict[str | None, float] = {}
    for row in rows:
        assert row.arrival_s >= last_s.get(row.session_id, 0.0)
        last_s[row.session_id] = row.arrival_s


def test_the_matrix_runs_once_and_is_kept(tmp_path: Path) -> None:
    """Every cell is in the summary, with the figures promised; the second time nothing runs.

    A line cut short by an abort is run again, and so is a cell that has changed.
    """
    selection = Selection(scenario=scenario_file(tmp_path), traces="/nonexistent")
    out = tmp_path / "out"

    def runs() -> list[dict[str, object]]:
        simulate(selection, out, quiet(), processes=1)
        found: list[dict[str, object]] = json.loads((out / "summary.json").read_text())["runs"]
        return found

    first = runs()
    assert {(run["policy"], run["load"]) for run in first} == {
        (policy, load) for policy in ("lmetric", "round_robin") for load in (0.5, 1.1)
    }
    wanted = {
        *("workload", "load", "policy", "instances", "routers", "staleness_s"),
        *("ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s"),
        *("goodput_rps", "hit_ratio", "imbalance", "requests"),
    }
    assert all(wanted <= run.keys() and run["requests"] for run in first)
    assert "<html" in (out / "report.html").read_text()
    kept = (out / "runs.jsonl").read_text().splitlines()
    assert runs() == first
    assert (out / "runs.jsonl").read_text().splitlines() == kept
    (out / "runs.jsonl").write_text("\n".join(kept)[:-5])
    again = runs()
    assert [r["ttft_mean_s"] for r in again] == [r["ttft_mean_s"] for r in first]
    assert len((out / "runs.jsonl").read_text().splitlines()) == len(kept) + 1


def test_a_kept_run_counts_only_for_the_trace_it_was_run_on(tmp_path: Path) -> None:
    """Another file of the same name is another workload."""
    spec = WorkloadSpec(name="w", trace=("t.jsonl",), generate="chat_mix")
    rows = base_rows(spec, NO_TRACES, requests_count=20, seed=1)
    cell = replace(CELL, workload=spec, traces=Traces(folder=tmp_path))
    seen = []
    for count in (20, 7, 7):
        write_trace(tmp_path / "t.jsonl", rows[:count])
        os.utime(tmp_path / "t.jsonl", (count, count))
        seen.append(digest(cell))
    assert seen[0] != seen[1] == seen[2]


def test_a_kept_run_counts_only_for_the_profile_it_was_run_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles decide about results as the source does; what only shows results does not."""
    monkeypatch.setattr(matrix, "files", lambda package: tmp_path / package)
    profile = tmp_path / "workers" / "profiles" / "device.toml"
    shown = tmp_path / "loadgen" / "simulation" / "lab" / "report" / "page.py"
    seen: list[str] = []
    for path in (profile, profile, shown):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"changed = {len(seen)}")
        matrix._code_digest.cache_clear()
        seen.append(digest(CELL))
    matrix._code_digest.cache_clear()
    assert seen[0] != seen[1] == seen[2]


def test_capacity_is_where_the_bounds_cease_to_hold() -> None:
    """At the rate found they hold, a twentieth above they do not."""
    bounds = Bounds(ttft_p99_s=1.0, tpot_mean_s=None)
    found = find_capacity(CELL, bounds, accuracy_ratio=0.05)
    assert found.rate > 0
    tried = dict(found.tried)
    assert tried[found.rate]
    above = min(rate for rate in tried if rate > found.rate)
    assert not tried[above]
    assert above <= found.rate * 1.05
    assert bounds.hold(measure(replace(CELL, rate=found.rate)))


def test_a_capacity_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept with the runs: to find it takes longer than some of them."""
    path = scenario_file(tmp_path, SMALL.replace("capacity_rps = 10.0\n", ""))
    selection = Selection(scenario=path, policies=["lmetric"], loads=[0.5])
    searches: list[str] = []

    def found(
        _: Workers, wanted: Mapping[str, Cell], bounds: Bounds
    ) -> Iterator[tuple[str, Found]]:
        del bounds
        for name in wanted:
            searches.append(name)
            yield name, Found(rate=10.0, at_rate=None, tried=())

    monkeypatch.setattr(Workers, "capacities", found)
    for _ in range(2):
        simulate(selection, tmp_path / "out", quiet(), processes=1)
        assert searches == ["mix"]
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [run["offered_rps"] for run in runs] == [5.0]


def test_a_workload_that_is_over_too_soon_has_no_capacity() -> None:
    """A few requests are borne at any rate; loads against such a capacity would mean nothing."""
    spec = WorkloadSpec(name="m", generate="chat_mix", requests_max=10, stretch="time")
    with pytest.raises(LoadgenError, match=r"m: .* any rate"):
        find_capacity(replace(CELL, workload=spec), Bounds())


def test_answers_of_one_token_have_no_tpot_to_keep() -> None:
    """A workload of such is bounded by its TTFT alone."""
    seen = replace(measure(replace(CELL, rate=2.0)), tpot_mean_s=nan)
    assert Bounds().hold(seen)
    assert not Bounds(ttft_p99_s=seen.ttft_p99_s / 2).hold(seen)
    assert not Bounds().hold(replace(seen, tpot_mean_s=1.0))


@pytest.mark.parametrize(("duration_s", "said"), [(20, True), (200, False)])
def test_a_capacity_of_a_short_run_is_said_to_be_too_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration_s: int, said: bool
) -> None:
    """Whose arrivals end before a queue could exceed the bound."""
    text = SMALL.replace("duration_s = 4", f"duration_s = {duration_s}")
    found = Found(rate=5.0, at_rate=None, tried=())
    monkeypatch.setattr(Workers, "capacities", lambda *_: [("mix, lmetric", found)])
    console = Console(record=True, quiet=False, width=400, file=io.StringIO())
    capacity(Selection(scenario=scenario_file(tmp_path, text)), Bounds(), console, processes=1)
    assert ("all arrive within 20 s" in console.export_text()) == said


def test_the_command_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A scenario that does not exist ends with status 2 and the names of those that do."""
    assert main(["simulate", "--scenario", "nothing", "--output", "/nonexistent/x"]) == 2
    assert "shipped ones" in capsys.readouterr().err.replace("\n", " ")
