"""Lua and Python name the same functions, and the names carry the schema version."""

import re
from pathlib import Path

from indexer.contract import functions
from indexer.contract.limits import SCHEMA_VERSION


def test_every_function_is_called_by_its_versioned_name() -> None:
    """What the libraries register is what the builders call, and starts with the version."""
    registered = set()
    for name in functions.LIBRARIES:
        registered |= set(re.findall(r"function_name='(\w+)'", functions.library_text(name)))
    called = set()
    for module in Path(functions.__file__).parent.glob("*.py"):
        called |= set(re.findall(r'"(ts\d+_\w+)"', module.read_text()))

    assert registered == called
    assert all(name.startswith(f"ts{SCHEMA_VERSION}_") for name in registered)
