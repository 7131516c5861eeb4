"""Which vLLM the plugins may change: only releases they were tested with, to the last number."""

from typing import Final

TESTED_VERSIONS: Final = ("0.32.0",)
"""The plugins replace parts that vLLM promises nothing about: another release may differ."""


class UntestedVersionError(RuntimeError):
    """The plugins were not tested with this vLLM; the message names those they were."""


def check_version(version: str) -> None:
    """Refuse a vLLM that the plugins were not tested with.

    Args:
        version: as vLLM tells it; what follows a `+` only names a build.

    Raises:
        UntestedVersionError: it is not among TESTED_VERSIONS.
    """
    if version.partition("+")[0] not in TESTED_VERSIONS:
        raise UntestedVersionError(
            f"vLLM {version} is not among the releases this plugin was tested with "
            f"({', '.join(TESTED_VERSIONS)}): it is not loaded, and vLLM stays as it is"
        )
