"""Every wrong key or value is named before anything starts."""

from pathlib import Path

import pytest

from router.config import RouterConfig, loggable, parse_config


def test_options_then_file_then_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest of three sources wins."""
    file = tmp_path / "router.yaml"
    file.write_text("port: 1\nhost: h\nadmin_port: 3\n")
    monkeypatch.setenv("TIMESTABLE_ROUTER_PORT", "2")
    monkeypatch.setenv("TIMESTABLE_ROUTER_HOST", "e")
    monkeypatch.setenv("TIMESTABLE_ROUTER_RETRIES_MAX", "7")
    config = parse_config(["--config", str(file), "--port=4", "--tokenize_threads", "5"])
    assert (config.port, config.tokenize_threads) == (4, 5)
    assert (config.host, config.admin_port) == ("h", 3)
    assert config.retries_max == 7


def test_tokenizers_are_a_map() -> None:
    """Given as JSON."""
    config = parse_config(["--tokenizers", '{"org/m": "/models/a-b"}'])
    assert config.tokenizers == {"org/m": "/models/a-b"}


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--prt", "5"], "--prt"),
        (["--port", "x"], "port"),
        (["--port", "70000"], "port"),
        (["--admin_port", "8000"], "admin_port"),
        (["--policy", "best"], "lmetric"),
        (["--redis_url", "http://x"], "redis_url"),
        (["--redis_url", "redis://h:99999"], "redis_url"),
        (["--keepalive_s", "5"], "keepalive_s"),
        (["--retries_max", "-1"], "retries_max"),
        (["--responses_kept_s", "2592001"], "responses_kept_s: 2.592e+06 is above 2592000"),
        (["--responses_kept_s", "inf"], "responses_kept_s: inf is above 2592000"),
        (["--responses_kept_s", "nan"], "responses_kept_s"),
        (["--ejection_ratio_max", "1.5"], "ejection_ratio_max"),
        (["--ejection_lease_s", "90"], "ejection_lease_s"),
        (["--log_level", "loud"], "log_level"),
        (["--in_flight_bytes_max", "10"], "in_flight_bytes_max"),
        (
            ["--detect_hot_prefixes", "true", "--share_reservations", "false"],
            "detect_hot_prefixes",
        ),
    ],
)
def test_a_wrong_value_ends_the_start(
    args: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the key in the message."""
    with pytest.raises(SystemExit) as caught:
        parse_config(args)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_the_password_is_not_logged() -> None:
    """Everything else is."""
    shown = loggable(RouterConfig(redis_url="redis://u:secret@h:1/0"))
    assert shown["redis_url"] == "redis://u:***@h:1/0"
    assert shown["port"] == 8000
