"""The command line: commands, options, and errors that name the option."""

import json
from pathlib import Path

import pytest
import trace_samples

from loadgen.__main__ import main
from loadgen.config import GenerateConfig, ReplayConfig, parse
from loadgen.errors import OutputError
from loadgen.outputs import check_output
from loadgen.trace import read_trace
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import read_rows


def test_options_of_a_command_become_its_config() -> None:
    """Values may follow `=` or a blank."""
    config = parse(["generate", "--out=a-b.jsonl", "--requests_count", "5"])
    assert GenerateConfig(out="a-b.jsonl", requests_count=5) == config


def test_environment_and_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option can come from the environment or from a YAML file."""
    file = tmp_path / "c.yaml"
    file.write_text("trace: t.jsonl\nheaders: {x-timestable-policy: round_robin}\n")
    monkeypatch.setenv("TIMESTABLE_LOADGEN_REPLAY__SEED", "7")
    config = parse(["replay", "--config", str(file)])
    assert isinstance(config, ReplayConfig)
    assert (
        config.trace,
        config.headers,
        config.seed,
    ) == ("t.jsonl", {"x-timestable-policy": "round_robin"}, 7)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["replay"], "trace"),
        (["replay", "--trace", "t", "--requests_max", "0"], "requests_max"),
        (["replay", "--trace", "t", "--request_rate", "fast"], "request_rate"),
        (["replay", "--trace", "t", "--vocabulary_tokens", "9999999"], "vocabulary_tokens"),
        (["replay", "--trace", "t", "--colour", "red"], "colour"),
        (["paint"], "paint"),
    ],
)
def test_bad_option_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    """Exit status 2 and the name on standard error."""
    with pytest.raises(SystemExit) as exit_info:
        parse(arguments)
    assert exit_info.value.code == 2
    assert named in capsys.readouterr().err


def test_bad_trace_is_status_2_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error a person can act on, no traceback."""
    path = tmp_path / "t.jsonl"
    path.write_text("oops\n")
    assert main(["replay", "--trace", str(path)]) == 2
    assert "t.jsonl, line 1: not valid JSON" in capsys.readouterr().err


def test_poisson_without_a_rate_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option to add."""
    out = tmp_path / "t.jsonl"
    main(["generate", "--out", str(out), "--requests_count", "3"])
    assert main(["replay", "--trace", str(out), "--arrivals", "poisson"]) == 2
    assert "poisson arrivals need --request_rate" in capsys.readouterr().err


def test_generate_writes_a_trace_that_reads_back(tmp_path: Path) -> None:
    """What one command writes the other reads."""
    out = tmp_path / "sub" / "t.jsonl.gz"
    assert main(["generate", "--out", str(out), "--requests_count", "20", "--seed", "3"]) == 0
    assert len(read_trace(out).rows) == 20


def test_generate_refuses_an_ending_that_replay_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written under a name that cannot be read."""
    out = tmp_path / "g.csv"
    assert main(["generate", "--out", str(out)]) == 2
    assert f"error: out: {out}: unknown kind of file" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("workload", ["chat", "chat_mix", "api_mix", "hot_prefix", "agents"])
def test_every_workload_is_written_in_order_of_arrival(tmp_path: Path, workload: str) -> None:
    """What is generated under a name reads back, sessions and categories with it."""
    out = tmp_path / "t.jsonl"
    options = ["--workload", workload, "--requests_count", "30"]
    assert main(["generate", "--out", str(out), *options]) == 0
    arrivals = [json.loads(line)["arrival_s"] for line in out.read_text().splitlines()]
    assert (30, sorted(arrivals)) == (len(arrivals), arrivals)
    assert all(row.session_id for row in read_trace(out).rows)


def test_setting_of_a_workload_is_checked_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nested options have dots in their names; a bad one is status 2, not a traceback."""
    out = tmp_path / "t.jsonl"
    options = ["--workload=hot_prefix", "--hot_prefix.hot_ratio=7"]
    assert main(["generate", "--out", str(out), *options]) == 2
    assert "error: hot_prefix.hot_ratio must be 0 to 1" in capsys.readouterr().err


def test_convert_writes_any_trace_in_order_of_arrival(tmp_path: Path) -> None:
    """Conversations that overlap come out interleaved; everything known of a row is kept."""
    trace = trace_samples.write(tmp_path / "w.jsonl", trace_samples.WEKA)
    out = tmp_path / "t.jsonl.gz"
    assert main(["convert", str(trace), "--output", str(out), "--session_rate", "0.2"]) == 0
    options = ReadOptions(session_rate=0.2)
    expected = sorted(read_rows([trace], options), key=lambda row: row.arrival_s)
    assert tuple(expected) == read_trace(out).rows
    assert [row.session_id for row in expected] != sorted(str(row.session_id) for row in expected)


def test_convert_takes_files_before_and_after_its_options(tmp_path: Path) -> None:
    """A trace of two files is one trace."""
    rates = trace_samples.write(tmp_path / "r.jsonl", trace_samples.SERVEGEN_RATES)
    lengths = trace_samples.write(tmp_path / "l.jsonl", trace_samples.SERVEGEN_LENGTHS)
    out = tmp_path / "t.jsonl"
    options = ["--prompts=unique", "--rows_max", "9", "--output", str(out)]
    assert main(["convert", str(rates), *options, str(lengths)]) == 0
    assert len(read_trace(out).rows) == 9


def test_convert_that_fails_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The choice that is missing is named; neither a part nor an old name is left."""
    trace = trace_samples.write(tmp_path / "a.jsonl", trace_samples.AZURE)
    assert main(["convert", str(trace), "--output", str(tmp_path / "t.jsonl")]) == 2
    assert "choose --prompts unique" in capsys.readouterr().err
    assert [trace] == list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["out", "html", "json"])
def test_output_is_checked_before_the_first_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """A file in the way of a directory is told before the server, which is not there, is asked."""
    trace, blocker = tmp_path / "t.jsonl", tmp_path / "file"
    main(["generate", "--out", str(trace), "--requests_count", "3"])
    blocker.write_text("")
    files = {"out": str(tmp_path / "r.jsonl"), option: str(blocker / "x")}
    options = [f"--{name}={path}" for name, path in files.items()]
    assert main(["replay", f"--trace={trace}", "--url=http://127.0.0.1:9", *options]) == 2
    assert f"error: {option}: {blocker}/x cannot be written" in capsys.readouterr().err


def test_checking_an_output_leaves_files_as_they_are(tmp_path: Path) -> None:
    """Old results are not emptied, none are made, the directory is there."""
    old, new = tmp_path / "old", tmp_path / "deep" / "new"
    old.write_text("kept")
    check_output("out", old)
    check_output("out", new)
    assert (old.read_text(), new.parent.is_dir(), new.exists()) == ("kept", True, False)


def test_directory_is_no_output(tmp_path: Path) -> None:
    """The message names the option."""
    with pytest.raises(OutputError, match=r"^html: .* is a directory"):
        check_output("html", tmp_path)
