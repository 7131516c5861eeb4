"""The trace analysis on traces small enough to do by hand, and as a command."""

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from trace_samples import BAILIAN, RAGPULSE, RAGPULSE_COMPONENTS, WEKA, write

from loadgen.__main__ import EXIT_BAD_INPUT, main
from loadgen.analysis.history import History
from loadgen.errors import OutputError
from loadgen.outputs import write_whole
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import single_traces
from loadgen.workloads.timestable import timestable_row

SIZE = 4


def _row(at_s: float, tokens: int, ids: list[int], session: str, **more: object) -> dict[str, Any]:
    return {
        "arrival_s": at_s,
        "prompt_tokens": tokens,
        "output_tokens": 7,
        "block_size_tokens": SIZE,
        "block_ids": ids,
        "session_id": session,
        **more,
    }


BY_HAND = [
    _row(0, 12, [1, 2, 3], "a", category="chat"),
    _row(1, 13, [1, 2, 4, 5], "b", category="tool"),  # its last block is not full
    _row(11, 16, [1, 2, 3, 6], "a", category="chat"),
    _row(12, 12, [1, 2, 4], "b", category="tool"),  # all there, but the last token is computed
    _row(12, 3, [9], "c", category="chat"),
]


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Summary, page and folder of the trace done by hand, beside one of another format."""
    folder = tmp_path_factory.mktemp("analysis")
    by_hand = write(folder / "by_hand.jsonl", BY_HAND)
    bailian = write(folder / "bailian.jsonl", BAILIAN)
    out = folder / "out"
    assert main(["analyze", str(by_hand), str(bailian), "--output", str(out)]) == 0
    return json.loads((out / "summary.json").read_text()), (out / "report.html").read_text(), out


def _of(analysed: tuple[dict[str, Any], str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = analysed[0]["traces"]["by_hand"]
    return found


def test_ideal_hit_ratio(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """Hits of 2, 3 and 2 blocks of 4 tokens, of 56 prompt tokens; reuses are one block more."""
    found = _of(analysed)
    assert found["prompt_tokens"] == 56
    assert found["ideal_hit_ratio"] == 28 / 56
    assert found["reused_blocks_ratio"] == 8 / 13


def test_skew(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """Five blocks were reused 3, 3, 1, 1 and 0 times: the first alone is the top 10 percent."""
    skew = _of(analysed)["skew"]
    assert skew["top_10_percent"] == 3 / 8
    assert skew["never_reused_ratio"] == 1 / 5


def test_hit_ratio_against_cache_size(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """LRU and the best order, of caches of one to five blocks."""
    caches = _of(analysed)["caches"]
    assert caches["capacity_tokens"] == [4, 8, 12, 16, 20]
    assert caches["latest_use"] == [n * SIZE / 56 for n in (3, 6, 6, 7, 7)]
    assert caches["best"] == [n * SIZE / 56 for n in (3, 6, 7, 7, 7)]
    assert caches["latest_use_tokens"] == {"50%": 8, "90%": 16, "99%": 16}


def test_single_and_multi_turn(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """One request of five is alone in its session; of eight reuses two are of its own touches."""
    found = _of(analysed)
    assert found["single_turn"]["requests_ratio"] == 1 / 5
    assert found["single_turn"]["reuse_ratio"] == 0
    assert found["multi_turn"]["own_session_ratio"] == 2 / 8


def test_gaps_by_category(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """A reuse counts for who touched the block last: chat's first turn, touched at 1 s and 11 s."""
    categories = {one["name"]: one for one in _of(analysed)["categories"]}
    everything = categories["all"]["gaps_s"]
    assert everything["count"] == 8
    assert everything["mean"] == (4 * 1 + 2 * 10 + 2 * 11) / 8
    first = categories["chat, turn 1"]
    assert (first["gaps_s"]["count"], first["gaps_s"]["mean"]) == (3, (1 + 1 + 11) / 3)
    assert first["reused_ratio"] == 3 / 3
    assert categories["tool, turn 1"]["gaps_s"]["mean"] == (10 + 10 + 11) / 3
    assert first["fit"]["rate_per_s"] == pytest.approx(1 / (13 / 3 - 0.3))


def test_lifespans_lengths_turns(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """Blocks 1 and 2 lived 12 s, 3 and 4 each 11 s; sessions have 2, 2 and 1 turns."""
    found = _of(analysed)
    assert found["lifespan_of_reused_s"]["mean"] == (12 + 12 + 11 + 11) / 4
    assert found["prefix_lengths"]["percentiles"][100] == 12
    assert found["turns_per_session"]["mean"] == 5 / 3
    assert found["working_set"][-1]["seen_tokens"] == 5 * SIZE


def test_each_trace_is_analysed_by_itself(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """Bailian's sample reuses one block of 16 tokens, whatever stands beside it."""
    bailian = analysed[0]["traces"]["bailian"]
    assert bailian["ideal_hit_ratio"] == 16 / 76
    assert bailian["sessions"] == 2


def test_the_page_needs_no_network(analysed: tuple[dict[str, Any], str, Path]) -> None:
    """Everything is in it: both traces, every plot, and nothing is loaded from elsewhere."""
    page = analysed[1]
    assert "by_hand" in page
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", page)
    plots = json.loads(page.split('id="plots">')[1].split("</script>")[0])
    assert {"caches", "gaps", "skew", "lives", "working-set", "lengths", "turns"} <= set(plots)
    for identity in plots:
        assert f'id="{identity}"' in page


def test_what_a_trace_leaves_open_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace without a common clock ends the command with the option that is missing."""
    trace = write(tmp_path / "weka.jsonl", WEKA)
    status = main(["analyze", str(trace), "--output", str(tmp_path / "out")])
    assert status == EXIT_BAD_INPUT
    assert "--session_rate" in capsys.readouterr().err


def test_an_empty_span_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing arrives in the span asked for, that is said, and there is no report."""
    trace = write(tmp_path / "t.jsonl", BY_HAND)
    out = tmp_path / "out"
    status = main(["analyze", str(trace), "--from_s", "1000", "--output", str(out)])
    assert status == EXIT_BAD_INPUT
    assert "--from_s" in capsys.readouterr().err
    assert not (out / "report.html").exists()


def test_second_files_go_with_every_trace(tmp_path: Path) -> None:
    """A format of two files is one trace; others of the same command are their own."""
    requests = write(tmp_path / "requests.jsonl", RAGPULSE)
    components = write(tmp_path / "components.jsonl", RAGPULSE_COMPONENTS)
    other = write(tmp_path / "other.jsonl", BY_HAND)
    found = single_traces([components, requests, other])
    assert found == [[requests, components], [other, components]]


def test_a_category_that_no_terminal_can_show(tmp_path: Path) -> None:
    """Half of a pair of characters and control characters are replaced, long names are cut."""
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps(_row(0, 4, [1], "a", category="\ud800\x1b[2J" + "x" * 1000)))
    assert main(["analyze", str(trace), "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())["traces"]["t"]
    assert found["categories"][1]["name"] == "??[2J" + "x" * 59 + ", turn 1"
    assert "??[2J" in (tmp_path / "out" / "report.html").read_text()


@contextmanager
def _files_of_at_most(size_bytes: int) -> Iterator[None]:
    """A disk that is full: what is written beyond this size of a file is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_earlier_report(tmp_path: Path) -> None:
    """A file is written whole or not at all; the error names the option and the file."""
    path = tmp_path / "report.html"
    write_whole("output", path, "earlier")
    with (
        pytest.raises(OutputError, match=r"output: .*report\.html cannot be written"),
        _files_of_at_most(1000),
    ):
        write_whole("output", path, "x" * 100_000)
    assert path.read_text() == "earlier"
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("rows_count", [10, 10_000], ids=["at_its_end", "on_the_way"])
def test_no_room_for_the_temporary_file(rows_count: int) -> None:
    """Where the runs of blocks cannot be kept, the error says what to set."""
    row = timestable_row(BY_HAND[0])
    with (
        pytest.raises(ValueError, match="TMPDIR"),
        History(ReadOptions(), memory_bytes_max=8) as history,
        _files_of_at_most(0),
    ):
        history.take([row] * rows_count)
