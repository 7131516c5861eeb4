"""The policy lab's page in a real Chromium, opened as a file: what a person sees and can do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import START_S, Chromium, Tab
from browser.seen import faint_texts, nameless, overflow_pixels, roles
from lab_runs import LOADS, POLICIES, drawn_run

from loadgen.simulation.lab.figures import RunKey
from loadgen.simulation.lab.report.page import write_page

pytestmark = pytest.mark.browser

SHOTS = Path(__file__).parents[2] / "build" / "browser"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1440, "height": 1000}
TTFT = "document.getElementById('w0-ttft')"
EVICTIONS = "document.getElementById('e6-0-hits')"
READY = "document.querySelector('.swatch').style.getPropertyValue('--own')"
ORDER = (
    "[...document.querySelectorAll('#w0 table')[0].tBodies[0].rows].map(r => r.cells[0].innerText)"
)


@pytest.fixture(scope="module")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two workloads, three loads, four policies; one workload also with stale routers.

    A third with two eviction policies at two sizes of the cache.
    """
    shapes = ((1, 0.0), (4, 0.0), (4, 1.0))
    runs = [
        drawn_run(
            RunKey(
                workload=workload,
                load=load,
                policy=policy,
                instances=16,
                routers=routers,
                staleness_s=staleness_s,
                seed=1,
            )
        )
        for workload in ("chat", "agents")
        for load in LOADS
        for policy in POLICIES[:4]
        for routers, staleness_s in (shapes if workload == "chat" else shapes[:1])
    ]
    runs += [
        replace(run, capacity_blocks=blocks, hit_ratio=ratio, variant=variant, eviction=eviction)
        for run in (
            drawn_run(
                RunKey(
                    workload="api",
                    load=0.5,
                    policy="lmetric",
                    instances=16,
                    routers=1,
                    staleness_s=0.0,
                    seed=1,
                )
            ),
        )
        for blocks, variant, eviction, ratio in (
            (1000, "small", "lru", 0.1),
            (1000, "small lfu", "lfu", 0.2),
            (9000, "ample", "lru", 0.4),
            (9000, "ample lfu", "lfu", 0.4),
        )
    ]
    path = tmp_path_factory.mktemp("lab") / "index.html"
    write_page(path, "Lab", runs, {"scenario": "<script>alert(1)</script>"}, agents={"agents"})
    return path.as_uri()


async def shown(tab: Tab, what: str) -> Any:
    """Of every trace of the plot of TTFT, once it is drawn."""
    await tab.see(READY, START_S)
    await tab.js(f"{TTFT}.scrollIntoView()")
    await tab.see(f"{TTFT}.data", START_S)
    return await tab.js(f"{TTFT}.data.map(trace => {what})")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_the_page_can_be_read(
    browser: Chromium, page_url: str, *, size: dict[str, int], dark: bool
) -> None:
    """No network, no overflow, no faint text, no control without a name; lines differ by colour."""
    async with browser.tab(page_url, **size, dark=dark) as tab:
        colours = await shown(tab, "trace.line.color")
        assert len(set(colours)) == 4
        assert colours[0] == ("#58b3ef" if dark else "#0a6fb0")
        assert await tab.js(f"{TTFT}.querySelectorAll('.scatterlayer .trace').length") == 4
        assert tab.problems == []
        assert [
            url for url in tab.requested if url != page_url and not url.startswith("data:")
        ] == []
        assert await overflow_pixels(tab) == 0
        assert await faint_texts(tab) == []
        assert await nameless(tab) == []
        assert {"navigation", "table", "radio", "checkbox"} <= set(await roles(tab))
        name = f"lab-{'phone' if size is PHONE else 'desktop'}-{'dark' if dark else 'light'}"
        await tab.look(SHOTS / f"{name}.png")


async def test_load_and_policies_are_chosen_for_all_plots(browser: Chromium, page_url: str) -> None:
    """Another load is another distribution, slower here; an unchecked policy is gone."""
    async with browser.tab(page_url, **DESKTOP) as tab:
        before = await shown(tab, "trace.x[50]")
        await tab.js("document.querySelector('#loads input[value=\"1.1\"]').click()")
        after = await shown(tab, "trace.x[50]")
        assert [later > earlier for earlier, later in zip(before, after, strict=True)] == [True] * 4
        assert "at load 110 %" in await tab.text("#w0 figure")
        await tab.js("document.querySelectorAll('#series input')[1].click()")
        assert await shown(tab, "trace.name") == ["lmetric", "vllm_v1", "linear_50"]


async def test_eviction_policies_are_drawn_over_the_size_of_the_cache(
    browser: Chromium, page_url: str
) -> None:
    """A line for each, of its own colour and in a legend, whatever routing policies are shown."""
    async with browser.tab(page_url, **DESKTOP) as tab:
        await tab.see(READY, START_S)
        await tab.js("document.querySelectorAll('#series input').forEach(box => box.click())")
        await tab.js(f"{EVICTIONS}.scrollIntoView()")
        await tab.see(f"{EVICTIONS}.data", START_S)
        drawn = await tab.js(f"{EVICTIONS}.data.map(trace => [trace.name, trace.y])")
        assert drawn == [["lru", [10, 40]], ["lfu", [20, 40]]]
        assert len(set(await tab.js(f"{EVICTIONS}.data.map(trace => trace.line.color)"))) == 2
        legend = f"[...{EVICTIONS}.querySelectorAll('.legendtext')].map(one => one.textContent)"
        assert await tab.js(legend) == ["lru", "lfu"]
        assert "+100 %" in await tab.text("#evictions table")
        await tab.look(SHOTS / "lab-evictions.png")


async def test_a_table_is_sorted_by_the_keyboard(browser: Chromium, page_url: str) -> None:
    """Enter on a heading: least first, again: most first; the heading says so."""
    async with browser.tab(page_url, **DESKTOP) as tab:
        await tab.see(READY, START_S)
        head = "document.querySelectorAll('#w0 table')[0].tHead.rows[0].cells[1]"
        await tab.js(f"{head}.querySelector('button').focus()")
        await tab.press("Enter")
        assert await tab.js(f"{head}.getAttribute('aria-sort')") == "ascending"
        assert await tab.js(ORDER) == list(POLICIES[:4])
        await tab.press("Enter")
        assert await tab.js(f"{head}.getAttribute('aria-sort')") == "descending"
        assert await tab.js(ORDER) == list(POLICIES[3::-1])


async def test_another_figure_of_the_overview_and_of_the_fleets(
    browser: Chromium, page_url: str
) -> None:
    """One table at a time, each by its own choice."""
    async with browser.tab(page_url, **DESKTOP) as tab:
        await tab.see(READY, START_S)
        await tab.js("document.querySelector('#overview input[value=hit_ratio]').click()")
        assert "hit ratio (%) against lmetric" in await tab.text("#overview")
        assert "TTFT mean (ms) against" not in await tab.text("#overview")
        assert "chat, load 50 %: TTFT mean (ms)" in await tab.text("#fleets")
        assert "4 routers, 1 s stale" in await tab.text("#fleets")
