"""The layout of a local fleet: who listens where and who is told about whom."""

from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.config import FleetConfig
from deploy.local.layout import FleetLayout, lay_out

CONFIG = FleetConfig(workers=2, routers=2, run_dir=Path("run"))


def layout(config: FleetConfig = CONFIG) -> FleetLayout:
    """Lay out a fleet on a machine where every port is free."""
    return lay_out(config, lambda wanted: wanted)


def test_routers_share_one_port_and_have_one_of_their_own() -> None:
    """Clients see one address; an operator can address each process."""
    commands = [router.command for router in layout().routers]
    shared = [command for command in commands if {"--port=8000", "--reuse_port=true"} <= {*command}]
    admin_urls = [router.admin_url for router in layout().routers]
    assert (commands, ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]) == (shared, admin_urls)


def test_each_sidecar_watches_its_own_engine() -> None:
    """The engine's URL is all a sidecar is told about it."""
    workers = layout().workers
    watched = [f"--engine_url={worker.engine_url}" in worker.sidecar_command for worker in workers]
    assert (watched, len({worker.engine_url for worker in workers})) == ([True, True], 2)


def test_no_two_listeners_share_a_port() -> None:
    """Every port is asked for once, except that routers share theirs."""
    wanted: list[int] = []

    def pick(port: int) -> int:
        wanted.append(port)
        return port

    lay_out(replace(CONFIG, workers=8, routers=4), pick)
    # Redis, the shared port, four admin ports, and four ports for each worker and its sidecar.
    assert (1 + 1 + 4 + 8 * 4) == len(set(wanted)) == len(wanted)


def test_prefill_and_decode_are_apart_on_demand() -> None:
    """The first workers prefill; without the option nothing is said of roles or connectors."""
    parted = replace(CONFIG, workers=3, prefill_workers=1)
    roles = [
        [option for option in worker.sidecar_command if option.startswith("--role")]
        for worker in layout(parted).workers
    ]
    assert roles == [["--role=prefill"], ["--role=decode"], ["--role=decode"]]
    told = [w.engine_command + w.sidecar_command for w in layout().workers]
    assert not any("--role" in word or "--kv_connector" in word for one in told for word in one)


def test_somebody_has_to_decode() -> None:
    """The message names the option."""
    with pytest.raises(ValueError, match="prefill_workers: 2 of 2"):
        replace(CONFIG, prefill_workers=2)


def test_journals_are_written_only_on_demand() -> None:
    """A fleet that stays up writes no file that only grows."""

    def journals(config: FleetConfig) -> int:
        commands = [worker.sidecar_command for worker in layout(config).workers]
        return sum("--journal_path" in " ".join(command) for command in commands)

    assert (journals(CONFIG), journals(replace(CONFIG, journal=True))) == (0, 2)
