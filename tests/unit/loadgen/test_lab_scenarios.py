"""Scenarios of the policy lab: what they may say, what comes of them, what is kept of a run."""

import json
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.__main__ import main
from loadgen.errors import LoadgenError
from loadgen.simulation.lab import matrix
from loadgen.simulation.lab.capacity import Bounds, find_capacity
from loadgen.simulation.lab.cells import Cell, measure
from loadgen.simulation.lab.command import Selection, simulate
from loadgen.simulation.lab.matrix import digest
from loadgen.simulation.lab.scenario import (
    Fleet,
    ScenarioError,
    Traces,
    WorkloadSpec,
    load_scenario,
)
from loadgen.simulation.lab.workloads import at_rate, base_rows
from loadgen.trace import write_trace

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
    """Every workload can be made without any trace; loads are stated against a known capacity."""
    scenario = Selection(scenario=name).chosen()
    for workload in scenario.workloads:
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
    ],
)
def test_a_wrong_scenario_is_refused_by_the_field(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    """The message names file and field."""
    path = scenario_file(tmp_path, SMALL.replace(*change))
    with pytest.raises(ScenarioError, match=message):
        Selection(scenario=path).chosen()


def test_what_there_is_not_is_named_with_what_there_is() -> None:
    """A scenario by a wrong name; a workload that the scenario does not have."""
    with pytest.raises(ScenarioError, match=r"shipped ones: .*default"):
        load_scenario("usual")
    with pytest.raises(ScenarioError, match=r"has no nothing; it has .*hot_prefix"):
        Selection(scenario="default", workloads=["nothing"]).chosen()


def test_a_trace_is_taken_where_it_is_and_its_twin_where_not(tmp_path: Path) -> None:
    """The same specification reads the file or generates."""
    spec = WorkloadSpec(name="w", trace=("t.jsonl",), generate="chat_mix")
    twin = base_rows(spec, Traces(folder=tmp_path), requests_count=20, seed=1)
    write_trace(tmp_path / "t.jsonl", twin[:7])
    assert len(base_rows(spec, Traces(folder=tmp_path), requests_count=20, seed=1)) == 7


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
    seen = []
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


def test_a_workload_that_is_over_too_soon_has_no_capacity() -> None:
    """A few requests are borne at any rate; loads against such a capacity would mean nothing."""
    spec = WorkloadSpec(name="m", generate="chat_mix", requests_max=10, stretch="time")
    with pytest.raises(LoadgenError, match="m: .* any rate"):
        find_capacity(replace(CELL, workload=spec), Bounds())


def test_the_command_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A scenario that does not exist ends with status 2 and the names of those that do."""
    assert main(["simulate", "--scenario", "nothing", "--output", "/nonexistent/x"]) == 2
    assert "shipped ones" in capsys.readouterr().err.replace("\n", " ")
