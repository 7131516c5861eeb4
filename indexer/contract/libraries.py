"""Texts of the Redis Functions, and the names under which this build's functions are on a server.

A function is called by its schema version and a digest of its library's text. So two builds of one
schema share the data, each with functions of its own, and neither loads over the other's.
"""

import hashlib
import re
from functools import lru_cache
from importlib import resources
from typing import Final

PARTS: Final = {
    "index_v1.lua": ("index_v1.lua",),
    "fleet_v1.lua": (
        *("fleet_v1.lua", "classes_v1.lua", "contexts_v1.lua", "reservations_v1.lua"),
        "heartbeat_v1.lua",
    ),
    "upkeep_v1.lua": ("upkeep_v1.lua",),
    "quota_v1.lua": ("quota_v1.lua",),
    "responses_v1.lua": ("responses_v1.lua",),
}
"""The files of each library's text, in order."""

DIGEST_CHARACTERS: Final = 8

_LIBRARY: Final = re.compile(r"^#!lua name=(\w+)")
_FUNCTION: Final = re.compile(r"(?<=function_name=')(\w+)(?=')")


@lru_cache(maxsize=len(PARTS))
def text(name: str) -> str:
    """A library as it is loaded.

    Args:
        name: its first file.
    """
    source = _source(name)
    ending = _ending(source)
    return _FUNCTION.sub(rf"\1{ending}", _LIBRARY.sub(rf"#!lua name=\1{ending}", source))


@lru_cache(maxsize=1)
def server_names() -> dict[str, str]:
    """Name of each function in the source -> its name on a server."""
    names: dict[str, str] = {}
    for library in PARTS:
        source = _source(library)
        names |= {name: name + _ending(source) for name in _FUNCTION.findall(source)}
    return names


def _source(name: str) -> str:
    folder = resources.files("indexer.contract")
    return "\n".join(folder.joinpath(part).read_text("utf-8") for part in PARTS[name])


def _ending(source: str) -> str:
    return "_" + hashlib.sha256(source.encode()).hexdigest()[:DIGEST_CHARACTERS]
