"""The command line that real vLLM is started with."""

import json

import pytest

from workers.config import ConfigError, VllmConfig
from workers.vllm.launch import VllmUnavailableError, check_version, command, launch


def test_events_and_cached_token_usage_are_on() -> None:
    """What sidecar and router rely on is in the command; extra flags come last."""
    line = command(VllmConfig(model="m", event_topic="t"), ["--max-model-len", "4096"])
    events = json.loads(line[line.index("--kv-events-config") + 1])
    assert events == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "t",
    }
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} < set(line)
    assert line[-2:] == ["--max-model-len", "4096"]


def test_length_of_the_replay_ring() -> None:
    """The ring is the engine's own unless asked for, then what was asked for."""
    line = command(VllmConfig(model="m", replay_batches_max=64), [])
    events = json.loads(line[line.index("--kv-events-config") + 1])
    assert events["buffer_steps"] == 64


@pytest.mark.parametrize("version", ["0.32.0", "0.31.1", "0.32.1.post1"])
def test_known_releases_pass(version: str) -> None:
    """Patch releases are fine."""
    check_version(version)


def test_unknown_release_says_what_to_do() -> None:
    """The message names the way out."""
    with pytest.raises(VllmUnavailableError, match="allow_unknown_version"):
        check_version("0.9.0")


def test_event_options_cannot_be_overridden_behind_our_back() -> None:
    """An extra --kv-events-config would silence the sidecar."""
    with pytest.raises(ConfigError, match="--event_endpoint"):
        launch(VllmConfig(model="m"), ["--kv-events-config", "{}"])
