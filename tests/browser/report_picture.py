r"""A picture of one plot of a report, as of `analyze` and `simulate`, for the README.

make analyze TRACE="mooncake_conversation.jsonl.gz mooncake_synthetic.jsonl.gz ..."
.venv/bin/python tests/browser/report_picture.py build/analyze caches docs/images/reuse.png
.venv/bin/python -m loadgen simulate --scenario eviction --workloads [agents] --loads [0.35] \
    --output build/eviction
.venv/bin/python tests/browser/report_picture.py build/eviction e0-0-hits docs/images/eviction.png
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import chromium
from browser.screenshots import shrink

SIZE = {"width": 860, "height": 460}

_ALONE = """
(() => {
  const figure = document.getElementById(PLOT).closest('figure');
  const legend = document.getElementById('series');
  const namesItsLines = PLOT.startsWith('e');  // the figures of evictions
  for (const hidden of document.querySelectorAll('body > *')) hidden.hidden = true;
  const alone = document.createElement('main');
  alone.append(...(namesItsLines ? [] : [legend]), figure);
  document.body.append(alone);
  for (const control of legend.querySelectorAll('input, legend')) control.style.display = 'none';
  scrollTo(0, 0);
})()
"""


async def main(folder: Path, plot: str, picture: Path) -> None:
    """Take the plot of that identity, with the names of its lines."""
    page = (folder / "report.html").resolve().as_uri()
    async with chromium() as browser, browser.tab(page, **SIZE, scale=2) as tab:
        await tab.see("document.querySelector('.swatch').style.getPropertyValue('--own')")
        await tab.js(_ALONE.replace("PLOT", json.dumps(plot)))
        await tab.js(f"document.getElementById({json.dumps(plot)}).scrollIntoView(false)")
        await tab.see(f"document.getElementById({json.dumps(plot)}).data")
        await tab.js("scrollTo(0, 0)")
        await tab.look(picture)
        shrink(picture)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
