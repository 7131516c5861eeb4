"""The trace analysis's page in a real Chromium, opened as a file."""

import pytest
from browser.chromium import START_S, Chromium
from browser.seen import faint_texts, nameless, overflow_pixels
from trace_samples import BAILIAN, write

from loadgen.__main__ import main

pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1440, "height": 1000}
READY = "document.querySelector('.swatch').style.getPropertyValue('--own')"
PLOTS = "[...document.querySelectorAll('.plot')]"


@pytest.fixture(scope="module")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two traces, alike so that either may be looked at alone."""
    folder = tmp_path_factory.mktemp("analysis")
    traces = [write(folder / "one.jsonl", BAILIAN), write(folder / "two.jsonl", BAILIAN)]
    output = folder / "out"
    assert main(["analyze", *map(str, traces), "--output", str(output)]) == 0
    return (output / "report.html").as_uri()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_the_page_can_be_read(
    browser: Chromium, page_url: str, *, size: dict[str, int], dark: bool
) -> None:
    """No network, no overflow, no faint text, no control without a name; every plot is drawn."""
    async with browser.tab(page_url, **size, dark=dark) as tab:
        await tab.see(READY, START_S)
        count = await tab.js(f"{PLOTS}.length")
        assert count >= 5
        for place in range(count):
            await tab.js(f"{PLOTS}[{place}].scrollIntoView()")
            await tab.see(f"{PLOTS}[{place}].data", START_S)
        assert tab.problems == []
        assert [u for u in tab.requested if u != page_url and not u.startswith("data:")] == []
        assert await overflow_pixels(tab) == 0
        assert await faint_texts(tab) == []
        assert await nameless(tab) == []


async def test_tables_are_sorted_and_traces_chosen(browser: Chromium, page_url: str) -> None:
    """A heading sorts its table, down and up; an unchecked trace leaves the plots."""
    async with browser.tab(page_url, **DESKTOP) as tab:
        await tab.see(READY, START_S)
        button = "document.querySelector('th .sort')"
        rows = f"[...{button}.closest('table').tBodies[0].rows].map(row => row.cells[0].innerText)"
        await tab.js(f"{button}.click()")
        up = await tab.js(rows)
        await tab.js(f"{button}.click()")
        assert await tab.js(rows) == up[::-1] != up
        await tab.js(f"{PLOTS}[0].scrollIntoView()")
        await tab.see(f"{PLOTS}[0].data", START_S)
        before = await tab.js(f"{PLOTS}[0].data.length")
        await tab.js("document.querySelector('#series input').click()")
        assert await tab.js(f"{PLOTS}[0].data.length") < before
