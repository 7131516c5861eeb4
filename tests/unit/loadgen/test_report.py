"""Table, JSON and HTML of runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.html import write_report
from loadgen.records import RequestRecord, Run
from loadgen.report import console_table, figures_json, table_rows

MakeRecord = Callable[..., RequestRecord]


@pytest.fixture
def runs(make_record: MakeRecord) -> list[Run]:
    """A fast and a slow run."""
    slow = make_record(first_token_s=2.5, token_times_s=(2.5, 2.9, 3.3), finished_s=3.3)
    return [
        Run(name="slow <b>", records=[slow], extra_figures={"router added, P50 (ms)": 1.25}),
        Run(name="fast", records=[make_record()], notes={"seed": "7"}),
    ]


def test_best_run_of_a_row_is_marked(runs: list[Run]) -> None:
    """Lower TTFT is better; equal values have no best; absent ones are shown as absent."""
    rows = {row.label: row for row in table_rows(runs)}
    assert (rows["TTFT mean (ms)"].cells, rows["TTFT mean (ms)"].best) == (("1,500.0", "500.0"), 1)
    assert rows["errors"].best is None
    assert rows["router added, P50 (ms)"].cells == ("1.25", "-")


def test_rows_nobody_has_a_figure_for_are_left_out(runs: list[Run]) -> None:
    """No decision headers, no row of predictions."""
    assert "hit ratio, predicted (%)" not in {row.label for row in table_rows(runs)}


def test_late_generator_gets_a_row_of_its_own(make_record: MakeRecord) -> None:
    """The mark is only there when it has something to say."""
    late = Run(name="late", records=[make_record(scheduled_s=0.0)])
    good = Run(name="good", records=[make_record()])
    labels = [{row.label for row in table_rows(r)} for r in ([good], [good, late])]
    assert ["generator kept up (yes/no)" in one for one in labels] == [False, True]


def test_console_table_shows_names_as_they_are(runs: list[Run]) -> None:
    """Brackets in names are no markup."""
    runs[0] = Run(name="[red]x[/red]", records=runs[0].records)
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(console_table("t [i]", runs))
    assert "[red]x[/red]" in captured.get()


def test_json_has_every_run_in_seconds(runs: list[Run]) -> None:
    """Programs get unrounded seconds."""
    parsed = json.loads(figures_json(runs))
    assert list(parsed["runs"]) == ["slow <b>", "fast"]
    assert parsed["runs"]["slow <b>"]["ttft_s"]["mean"] == 1.5


def test_html_is_one_file_that_needs_no_network(tmp_path: Path, runs: list[Run]) -> None:
    """plotly.js is inside once, nothing is loaded from outside, names are escaped."""
    path = tmp_path / "deep" / "report.html"
    write_report(path, "A & B", runs, {"rate": "<3 requests/s"})
    html = path.read_text()
    assert html.count("plotly.js v") == 1
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", html)
    assert "slow &lt;b&gt;" in html
    assert "A &amp; B" in html
    assert "&lt;3 requests/s" in html
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings == [
        "What was run",
        "Figures",
        "Time to first token",
        "Time per output token",
        "Batch size per instance",
        "Hit ratio over time",
        "Notes per run",
    ]


def test_html_of_a_run_where_all_failed(tmp_path: Path, make_record: MakeRecord) -> None:
    """No plot has data; the table says what there is."""
    failed = make_record(
        sent_s=1.0,
        first_token_s=None,
        token_times_s=(),
        error="connect: refused",
        cached_tokens=None,
        instance=None,
    )
    write_report(tmp_path / "r.html", "t", [Run(name="x", records=[failed])], {})
    assert re.findall(r"<h2>(.*?)</h2>", (tmp_path / "r.html").read_text()) == ["Figures"]


def test_every_figure_but_counts_has_a_unit(make_record: MakeRecord) -> None:
    """A label ends with its unit in brackets; requests, errors and rates carry it as a word."""
    late = Run(name="late", records=[make_record(scheduled_s=0.0)])
    bare = [row.label for row in table_rows([late]) if not row.label.endswith(")")]
    assert bare == ["requests", "errors", "output tokens/s"]
