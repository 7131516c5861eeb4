"""Options of the sidecar."""

from pathlib import Path

import pytest

from indexer.config import InspectConfig, SidecarConfig, loggable, parse


def test_without_a_word_it_is_the_sidecar() -> None:
    """`run` may be left out."""
    expected = SidecarConfig(redis_url="redis://h:1", scrape_interval_s=0.05)
    args = ["--redis_url", "redis://h:1", "--scrape_interval_s=0.05"]
    assert expected == parse(args) == parse(["run", *args])


def test_inspect_has_options_of_its_own() -> None:
    """The subcommand reads only where Redis is and how to print."""
    assert InspectConfig(format="json") == parse(["inspect", "--format", "json"])


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option is an environment variable too; the command line wins."""
    monkeypatch.setenv("TIMESTABLE_INDEXER_METRICS_PORT", "1")
    monkeypatch.setenv("TIMESTABLE_INDEXER_PARTITIONS", "2")
    assert SidecarConfig(metrics_port=3, partitions=2) == parse(["--metrics_port", "3"])


def test_file(tmp_path: Path) -> None:
    """And a line of a file."""
    path = tmp_path / "sidecar.yaml"
    path.write_text("engine_url: http://pod:1\n")
    assert SidecarConfig(engine_url="http://pod:1") == parse(["--config", str(path)])


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (["--engine_url", "pod:8000"], "engine_url"),
        (["--advertised_url", "ftp://x"], "advertised_url"),
        (["--redis_url", "http://x"], "redis_url"),
        (["--block_size_tokens", "4"], "block_size_tokens"),
        (["--block_size_tokens", "many"], "block_size_tokens"),
        (["--partitions", "17"], "partitions"),
        (["--partitions", "0"], "partitions"),
        (["--scrape_interval_s", "2"], "scrape_interval_s"),
        (["--metrics_port", "70000"], "metrics_port"),
        (["--replay_endpoint", "tcp://h:1"], "replay_endpoint"),
        (["--novelty", "1"], "novelty"),
        (["inspect", "--redis_url", "x"], "redis_url"),
    ],
)
def test_bad_options_are_named(
    args: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad value ends the process with a message that names its key."""
    with pytest.raises(SystemExit) as exit_info:
        parse(args)
    assert exit_info.value.code == 2
    assert key in capsys.readouterr().err


def test_secrets_are_not_logged() -> None:
    """The effective options are logged without keys and passwords."""
    config = SidecarConfig(engine_api_key="k", redis_url="redis://u:secret@h:1/0")
    shown = loggable(config)
    assert (shown["engine_api_key"], shown["redis_url"]) == ("***", "redis://u:***@h:1/0")
