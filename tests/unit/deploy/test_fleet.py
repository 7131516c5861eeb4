"""A fleet's folder: its own files are replaced, nobody else's is touched."""

from pathlib import Path

import pytest

from deploy.local.config import FleetConfig
from deploy.local.errors import RunDirError
from deploy.local.fleet import _empty_run_dir
from deploy.local.layout import journal_path


def test_only_what_an_earlier_fleet_left_is_removed(tmp_path: Path) -> None:
    """A run_dir that holds a person's files keeps them."""
    config = FleetConfig(run_dir=tmp_path)
    logs = _empty_run_dir(config)
    mine = [tmp_path / "notes.txt", logs / "notes.txt"]
    for path in (*mine, logs / "router-1.log", journal_path(config, 1)):
        path.write_text("words")
    _empty_run_dir(config)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(mine)


def test_a_run_dir_that_is_a_file_is_told(tmp_path: Path) -> None:
    """The message names the option."""
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(RunDirError, match=r"run_dir: .*file"):
        _empty_run_dir(FleetConfig(run_dir=path))
