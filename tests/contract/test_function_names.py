"""Lua and Python name the same functions; on a server a name tells schema version and text."""

import re
from pathlib import Path

import pytest
from contract.embedded_server import EmbeddedServer

from indexer.contract import functions, libraries, reservations
from indexer.contract.identifiers import FleetId, RouterId
from indexer.contract.limits import SCHEMA_VERSION


def test_every_function_is_called_by_its_versioned_name() -> None:
    """What the libraries register is what the builders call, and starts with the version."""
    registered = set(libraries.server_names())
    called = set()
    for module in Path(functions.__file__).parent.glob("*.py"):
        called |= set(re.findall(r'"(ts\d+_\w+)"', module.read_text()))

    assert registered == called
    assert all(name.startswith(f"ts{SCHEMA_VERSION}_") for name in registered)


def test_what_is_loaded_carries_the_names_that_are_called() -> None:
    """Every function of every text ends in that text's digest, as does its library."""
    loaded = {}
    for name in libraries.PARTS:
        text = libraries.text(name)
        ending = re.findall(r"^#!lua name=\w+(_[0-9a-f]{8})\n", text)[0]
        loaded |= dict.fromkeys(re.findall(r"function_name='(\w+)'", text), ending)

    assert set(libraries.server_names().values()) == set(loaded)
    assert all(name.endswith(ending) for name, ending in loaded.items())


def test_builds_with_other_texts_share_a_server(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another text is loaded beside, not over, the first; both work on the same books."""
    fleet, router = FleetId("0" * 16), RouterId("r")
    begin = reservations.register(fleet, router, begin=True)
    renew = reservations.register(fleet, router, begin=False)
    assert server.redis.execute_command(*begin.command()) == 1
    folder = Path(libraries.__file__).parent
    for name in {part for parts in libraries.PARTS.values() for part in parts}:
        (tmp_path / name).write_text((folder / name).read_text() + "-- a later build\n")
    ours = renew.command()

    with monkeypatch.context() as later:
        later.setattr(libraries.resources, "files", lambda _: tmp_path)
        libraries.text.cache_clear()
        libraries.server_names.cache_clear()
        try:
            theirs = renew.command()
            for name in libraries.PARTS:
                server.redis.execute_command("FUNCTION", "LOAD", libraries.text(name))
        finally:
            libraries.text.cache_clear()
            libraries.server_names.cache_clear()

    assert ours[1] != theirs[1]
    assert server.redis.execute_command(*theirs) == 1
    assert server.redis.execute_command(*ours) == 1
