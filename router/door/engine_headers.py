"""What engines see of a client's credentials."""

from collections.abc import Mapping
from typing import Final

from multidict import CIMultiDict

from router.door.options import DoorOptions, asks_for_keys

KEY_HEADERS: Final = ("Authorization", "x-api-key")


class EngineHeaders:
    """Takes the client's key out of headers where it was meant for this router.

    Args:
        options: whether keys are asked for here, and what engines ask for.
    """

    def __init__(self, options: DoorOptions) -> None:
        key = options.engine_api_key
        self._own = None if key is None else f"Bearer {key}"
        hides = asks_for_keys(options) and not options.forward_authorization
        self._replaces = hides or key is not None

    def of(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The client's headers as an engine shall see them."""
        if not self._replaces:
            return headers
        kept: CIMultiDict[str] = CIMultiDict(headers)
        for name in KEY_HEADERS:
            kept.popall(name, None)
        if self._own is not None:
            kept["Authorization"] = self._own
        return kept
