"""Options of the sidecar."""

import socket
from pathlib import Path

import pytest

from indexer.__main__ import main
from indexer.config import InspectConfig, SidecarConfig, host_and_port, loggable, parse


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
        (["--scrape_interval_s", "1e-320"], "scrape_interval_s"),
        (["--metrics_port", "70000"], "metrics_port"),
        (["--replay_endpoint", "tcp://h:1"], "replay_endpoint"),
        (["--engine_ranks", "2"], "engine_ranks"),
        (["--engine_cert", "x"], "engine_key"),
        (["--engine_ranks", "257", "--event_endpoint", "tcp://h:1"], "engine_ranks"),
        (["--engine_block_size_tokens", "0"], "engine_block_size_tokens"),
        (["--event_endpoint", "h:5557"], "event_endpoint"),
        (["--event_endpoint", "tcp://h"], "event_endpoint"),
        (["--event_endpoint", "tcp://h:70000"], "event_endpoint"),
        (["--event_endpoint", "tcp://:5557"], "event_endpoint"),
        (["--event_endpoint", "ipc://"], "event_endpoint"),
        (["--event_endpoint", "tcp://h:1", "--replay_endpoint", "no"], "replay_endpoint"),
        (["--instances_expected", "4097"], "instances_expected"),
        (["--engines_dns", "name"], "engines_dns"),
        (["--engines_dns", "name:0"], "engines_dns"),
        (["--engines_dns", "http://name:1"], "engines_dns"),
        (["--engines_dns", "n:1", "--engines_file", "f"], "engines_dns"),
        (["--engines_file", "f", "--advertised_url", "http://x"], "advertised_url"),
        (["--engines_file", "f", "--checkpoint_path", "d"], "checkpoint_path"),
        (["--approximate", "true", "--event_endpoint", "tcp://h:1"], "event_endpoint"),
        (["--prefill_tokens_per_s", "0"], "prefill_tokens_per_s"),
        (["--tier_tokens_per_s", "1000"], "tier_media"),
        (["--tier_media", '["CPU"]'], "tier_tokens_per_s"),
        (["--tier_media", '["GPU"]', "--tier_tokens_per_s", "1000"], "tier_media"),
        (["--tier_media", '["CPU"]', "--tier_tokens_per_s", "0.5"], "tier_tokens_per_s"),
        (
            ["--tier_media", '["CPU"]', "--tier_tokens_per_s", "9", "--tier_latency_s", "1e9"],
            "tier_latency_s",
        ),
        (
            ["--tier_media", '["CPU"]', "--tier_tokens_per_s", "9", "--approximate", "true"],
            "tier_media",
        ),
        (["--prefill_tokens_per_s", "inf"], "prefill_tokens_per_s"),
        (["--prefill_tokens_per_s", "1e-9"], "prefill_tokens_per_s"),
        (["--redis_url", "redis://h:70000"], "error: redis_url: Port out of range"),
        (["--redis_url", "redis://h:port"], "error: redis_url: Port out of range"),
        (["--redis_url", "redis://h:1?db=x"], "error: redis_url: Invalid value for 'db'"),
        (["--redis_url", "redis://h:1?novelty=x"], "error: redis_url: "),
        (["--redis_url", "redis://[h"], "error: redis_url: "),
        (["--novelty", "1"], "novelty"),
        (["inspect", "--redis_url", "x"], "redis_url"),
        (["inspect", "--redis_url", "redis://h:70000"], "error: redis_url: Port out of range"),
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


@pytest.mark.parametrize("url", ["redis://h", "rediss://u:p@h:1/0", "unix:///run/redis.sock"])
def test_redis_urls_are_taken(url: str) -> None:
    """All three kinds, with and without what may be left out."""
    assert url == SidecarConfig(redis_url=url).redis_url


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("engines:8000", ("engines", 8000)),
        ("[::1]:1", ("::1", 1)),
        ("u@h:1", None),
        ("h:1/x", None),
    ],
)
def test_a_name_and_a_port(text: str, place: tuple[str, int] | None) -> None:
    """And nothing else beside them."""
    assert host_and_port(text) == place


def test_ranks_can_be_told_where_no_events_are_followed() -> None:
    """Of an engine alone, or of each on a list."""
    for options in ({"approximate": True}, {"engines_file": Path("f")}, {"engines_dns": "n:1"}):
        assert SidecarConfig(engine_ranks=2, **options).engine_ranks == 2


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::1]:1", "tcp://h:1", "ipc:///x"])
def test_event_endpoints_are_taken(endpoint: str) -> None:
    """Host or wildcard with a port, or a socket file."""
    assert endpoint == SidecarConfig(event_endpoint=endpoint).event_endpoint


def test_taken_metrics_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The sidecar ends with status 1; the log names the option and the number."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--metrics_host=127.0.0.1", f"--metrics_port={port}"]) == 1
    assert f"metrics_port: {port} on 127.0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["engine_ca", "engine_cert"])
def test_certificates_that_cannot_be_used_end_the_start(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Redis is looked for, with the option's name."""
    args = [f"--{option}=/nonexistent", "--redis_url=unix:///nonexistent", "--metrics_port=0"]
    args += ["--engine_key=/nonexistent"] if option == "engine_cert" else []
    assert main(args) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "sidecar_failed" in line]
    assert option in failed[0]
