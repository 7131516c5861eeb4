"""Eviction policies as an axis of the lab."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
from lab_runs import lab_run
from plotly import graph_objects

from loadgen.simulation.lab.cells import measure
from loadgen.simulation.lab.command import Selection
from loadgen.simulation.lab.demand import Demand, demanded
from loadgen.simulation.lab.fleet import LabFleet
from loadgen.simulation.lab.matrix import cells, digest
from loadgen.simulation.lab.report.eviction_views import eviction_views
from loadgen.simulation.lab.report.evictions import eviction_rows, eviction_tables
from loadgen.simulation.lab.report.page import page
from loadgen.simulation.lab.report.summary import summary_json
from loadgen.simulation.lab.scenario import ScenarioError, Traces
from loadgen.simulation.lab.spec import LabSpec
from loadgen.workloads.cache_mix import CHAT_MIX, generate_mix
from router.policies import POLICIES

AMPLE_BLOCKS, SMALL_BLOCKS = 1 << 15, 2000

SCENARIO = """
policies = ["lmetric"]
loads = [0.5]
evictions = ["lru", "gdfs"]

[[fleets]]
variant = "small"
instances = 1
capacity_blocks = 4_000

[[workloads]]
name = "mix"
generate = "chat_mix"
duration_s = 2
stretch = "time"
capacity_rps = 10.0
"""


@pytest.fixture(scope="module")
def demand() -> Demand:
    """A chat of many kinds of requests."""
    rows = tuple(generate_mix(CHAT_MIX, requests_count=90, seed=3))
    return demanded(rows, pace="timestamps", block_size_tokens=16)


def play(demand: Demand, eviction: str, capacity_blocks: int) -> dict[str, list[float]]:
    """What every request met on one instance."""
    spec = LabSpec(instances=1, capacity_blocks=capacity_blocks, eviction=eviction)
    requests = LabFleet(spec, POLICIES["lmetric"], demand, seed=1).play().requests
    columns = ("arrived_s", "first_token_s", "ended_s", "hit_tokens")
    return {name: getattr(requests, name).tolist() for name in columns}


def test_where_nothing_is_evicted_every_policy_is_the_same(demand: Demand) -> None:
    """To the last bit: a policy decides which block goes, and nothing else."""
    plain = play(demand, "lru", AMPLE_BLOCKS)
    for eviction in ("s3_fifo", "workload_aware", "belady"):
        assert plain == play(demand, eviction, AMPLE_BLOCKS), eviction


def test_in_a_small_cache_nobody_is_better_than_who_knows_the_future(demand: Demand) -> None:
    """And the policies do differ."""
    names = ("lru", "fifo", "lfu", "belady")
    hits = {name: sum(play(demand, name, SMALL_BLOCKS)["hit_tokens"]) for name in names}
    assert max(hits, key=hits.__getitem__) == "belady"
    assert len(set(hits.values())) == len(names), hits


def test_requests_bring_their_category_to_the_engine(demand: Demand) -> None:
    """Its kind, as the rows say, and its turn."""
    found = {request.category for request in demand.requests}
    assert {category.kind for category in found if category} >= {"text", "file"}
    turns = [request.category.turn for request in demand.requests if request.category]
    assert list(demand.turns) == turns
    assert max(turns) > 0


def test_the_axis_is_in_the_matrix_and_in_the_summary(tmp_path: Path) -> None:
    """What was run by eviction policy and size of the cache; a run of another policy is another."""
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    scenario = Selection(scenario=str(path)).chosen()
    wanted = cells(scenario, Traces(folder=tmp_path), {"mix": 10.0})
    assert [cell.key.variant for cell in wanted] == ["small", "small gdfs"]
    assert len({digest(cell) for cell in wanted}) == 2
    summary = json.loads(summary_json([measure(cell) for cell in wanted]))
    assert [(row["policy"], row["cache_blocks"]) for row in summary["eviction"]] == [
        ("lru", 4000),
        ("gdfs", 4000),
    ]
    fields = {"workload", "load", "routing", "hit_ratio", "queued_ttft_mean_s"}
    assert all(fields <= row.keys() for row in summary["eviction"])
    assert [run["eviction"] for run in summary["runs"]] == ["lru", "gdfs"]


def test_an_eviction_policy_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """In the file and as an option, with those that are."""
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    with pytest.raises(ScenarioError, match="no `mru`; there are lru, fifo"):
        Selection(scenario=str(path), evictions=["mru"]).chosen()
    path.write_text(SCENARIO.replace("gdfs", "mru"))
    with pytest.raises(ScenarioError, match="no `mru`; there are lru, fifo"):
        Selection(scenario=str(path)).chosen()


def test_gains_are_those_over_lru_in_the_same_place() -> None:
    """Means over seeds; a place without LRU has no gain."""
    runs = [
        lab_run(eviction=eviction, capacity_blocks=blocks, seed=seed, **figures)
        for eviction, blocks, seed, figures in (
            ("lru", 100, 1, {"hit_ratio": 0.3, "ttft_mean_s": 1.0}),
            ("lru", 100, 2, {"hit_ratio": 0.5, "ttft_mean_s": 3.0}),
            ("fifo", 100, 1, {"hit_ratio": 0.5, "ttft_mean_s": 1.0}),
            ("fifo", 200, 1, {"hit_ratio": 0.6, "ttft_mean_s": 1.0}),
        )
    ]
    rows = eviction_rows(runs)
    assert [(row.policy, row.cache_blocks) for row in rows] == [
        ("lru", 100),
        ("fifo", 100),
        ("fifo", 200),
    ]
    gains = [(row.hit_ratio_gain, row.queued_ttft_gain) for row in rows]
    np.testing.assert_allclose(gains, [(0, 0), (0.25, -0.5), (nan, nan)])
    assert "| fifo | 50.0%, 1 s (+25.0%, -50.0%) | 60.0%, 1 s |" in eviction_tables(rows)
    assert rows[1] == replace(rows[1], workload="chat", load=0.5, routing="lmetric")


def test_fleets_of_one_cache_size_are_not_taken_for_one() -> None:
    """With a tier and without: two columns, and no line over sizes."""
    rows = eviction_rows(
        lab_run(
            eviction=eviction,
            capacity_blocks=100,
            variant=f"{variant} {eviction}".replace("lru", "").strip(),
            hit_ratio=ratio,
        )
        for variant, ratio in (("", 0.2), ("tier", 0.4))
        for eviction in ("lru", "lfu")
    )
    assert [row.hit_ratio for row in rows] == [0.2, 0.2, 0.4, 0.4]
    [view] = eviction_views(rows)
    assert view.charts == ()
    plain = "100 blocks, 16 instances, 1 router"
    assert view.grids[0].columns == (plain, f"{plain}, tier")
    assert f"| eviction | {plain} | {plain}, tier |" in eviction_tables(rows)


def test_every_workload_and_load_has_a_pair_of_charts_over_the_cache_size() -> None:
    """A line per policy, by size in ascending order; what is not measured is a gap."""
    runs = [
        lab_run(
            workload=workload,
            load=load,
            eviction=eviction,
            variant="" if eviction == "lru" else eviction,
            capacity_blocks=blocks,
            hit_ratio=blocks / 1000,
            ttft_mean_s=nan if eviction == "lfu" and blocks == 100 else 10 / blocks,
        )
        for workload in ("chat", "api")
        for load in (0.35, 0.5)
        for eviction in ("lru", "lfu")
        for blocks in (800, 100)
    ]
    views = eviction_views(eviction_rows(runs))
    assert [view.heading for view in views] == [
        f"{workload}, load {load} %, routed by lmetric"
        for workload in ("chat", "api")
        for load in (35, 50)
    ]
    identities = [chart.identity for view in views for chart in view.charts]
    assert len(set(identities)) == len(identities) == 8
    hits, ttft = views[0].charts
    for chart in (hits, ttft):
        graph_objects.Figure(data=chart.traces[""], layout=chart.layout)
    assert [(one["name"], one["x"], one["y"]) for one in hits.traces[""]] == [
        ("lru", [100, 800], [10, 80]),
        ("lfu", [100, 800], [10, 80]),
    ]
    assert [one["y"] for one in ttft.traces[""]] == [[0.1, 0.0125], [None, 0.0125]]
    html = page("t", runs, {})
    assert all(f'id="{identity}"' in html for identity in identities)
    assert 'id="evictions"' not in page("t", [run for run in runs if run.eviction == "lru"], {})


def test_eviction_and_routing_are_a_square() -> None:
    """Rows are eviction policies, columns those of routing; the best cell is the warmest."""
    routings, policies = ("lmetric", "smetric"), ("lru", "gdfs")
    ratios = iter((0.2, 0.3, 0.25, 0.5))
    runs = [
        lab_run(routing, eviction=policy, capacity_blocks=100, hit_ratio=next(ratios))
        for routing in routings
        for policy in policies
    ]
    [view] = eviction_views(eviction_rows(runs))
    assert view.heading == "chat, load 50 %, 100 blocks: eviction and routing"
    hits, ttft = view.grids
    assert (hits.columns, [row.policy for row in hits.rows]) == (routings, list(policies))
    cells = [cell and (cell.text, cell.difference) for row in hits.rows for cell in row.cells]
    assert cells == [("20.0 %", ""), ("25.0 %", ""), ("30.0 %", "+50 %"), ("50.0 %", "+100 %")]
    heats = [cell.heat for row in hits.rows for cell in row.cells if cell]
    np.testing.assert_allclose(heats, [0, 1 / 6, 1 / 3, 1])
    assert [cell and cell.text for cell in ttft.rows[0].cells] == ["200 ms", "200 ms"]
