"""What can be measured of a page as it is seen: contrast, overflow, roles."""

from pathlib import Path
from typing import Any

from browser.chromium import Tab

CONTRAST_MIN = 4.5
"""WCAG 2.2 AA of text of any size."""

_CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text()


async def faint_texts(tab: Tab) -> list[Any]:
    """Texts that cannot be read well on what lies behind them, with their contrast."""
    measured = await tab.js(_CONTRASTS)
    assert len(measured) > 3, measured
    return [(round(ratio, 2), text) for ratio, text in measured if ratio < CONTRAST_MIN]


async def overflow_pixels(tab: Tab) -> int:
    """How much wider than the window the page is."""
    return int(await tab.js("document.documentElement.scrollWidth - innerWidth"))


async def roles(tab: Tab) -> list[str]:
    """Of everything that a screen reader is told, in order."""
    tree = await tab.call("Accessibility.getFullAXTree")
    return [one["role"]["value"] for one in tree["nodes"] if not one["ignored"]]


async def nameless(tab: Tab) -> list[str]:
    """Controls and tables that a screen reader cannot name."""
    tree = await tab.call("Accessibility.getFullAXTree")
    wanted = {"button", "textbox", "searchbox", "table", "link", "article"}
    return [
        one["role"]["value"]
        for one in tree["nodes"]
        if not one["ignored"]
        and one["role"]["value"] in wanted
        and not one.get("name", {}).get("value")
    ]
