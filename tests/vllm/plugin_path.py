"""What makes our plugins visible to a vLLM: on its path, with their entry points, as installed."""

import tomllib
from pathlib import Path

from tests.vllm.settings import ROOT


def plugin_path(folder: Path) -> str:
    """PYTHONPATH for a vLLM that shall find the plugins.

    The folder gets the metadata that `pip install --no-deps` would write, without building a wheel.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{folder}:{ROOT}"
