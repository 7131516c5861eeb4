"""Pictures of the live page of a running router, for the README.

make up                                                         # a fleet, and load on it
.venv/bin/python tests/browser/screenshots.py http://127.0.0.1:8000 docs/images
"""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import Tab, chromium

TELLING = "holds more of the prompt"
"""In the explanation of the decision that is opened, where there is one: load won over hits."""

SIZES = {
    "dashboard-light": {"width": 1280, "height": 860},
    "dashboard-dark": {"width": 1280, "height": 860, "dark": True},
    "dashboard-phone": {"width": 390, "height": 844, "dark": True},
}

_FIND = """
(async () => {
  const list = (await (await fetch('/decisions?limit=100')).json()).decisions;
  for (const one of list) {
    const path = '/decisions?request_id=' + encodeURIComponent(one.request_id);
    const found = (await (await fetch(path)).json()).decisions[0];
    if (found.attempts[0].explanation.includes(TELLING)) return one.request_id;
  }
  return list[3].request_id;
})()
""".replace("TELLING", json.dumps(TELLING))


async def main(url: str, folder: Path) -> None:
    """Take them all."""
    async with chromium() as browser:
        for name, size in SIZES.items():
            async with browser.tab(f"{url}/dashboard", **size, scale=2) as tab:
                await tab.see("document.querySelectorAll('.list tbody tr').length > 8")
                await open_telling(tab)
                await tab.look(folder / f"{name}.png")
                shrink(folder / f"{name}.png")


def shrink(picture: Path) -> None:
    """To a palette of few colours, which is all the page has, where pngquant is installed."""
    if quantizer := shutil.which("pngquant"):
        options = ("--force", "--strip", "--skip-if-larger", "--output", str(picture), "64")
        subprocess.run([quantizer, *options, str(picture)], check=True)


async def open_telling(tab: Tab) -> None:
    """Open a decision that is worth explaining, from the top of the page."""
    request_id = await tab.js(_FIND)
    await tab.js(f"document.getElementById('find-id').value = {json.dumps(request_id)}")
    await tab.js("document.querySelector('#find button').click()")
    await tab.see("document.querySelector('.detail .why')")
    await tab.js(
        "(() => { document.getElementById('find-id').value = ''; document.activeElement.blur(); "
        "scrollTo(0, innerWidth < 600 ? document.getElementById('decisions').offsetTop - 20 : 0)"
        "})()"
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].rstrip("/"), Path(sys.argv[2])))
