"""Which engines one process is the sidecar of: lines of a file, or addresses of a name."""

import asyncio
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import structlog

from indexer.config import is_http
from indexer.errors import ListUnreadable

FILE_BYTES_MAX: Final = 1 << 20
READ_DEADLINE_S: Final = 5.0
SETTLE_S: Final = 0.2

MISSED_MAX: Final = 2
"""Answers in a row that may lack an address: name servers leave some out."""

_PLACE: Final = re.compile(r"\w+://[^/?#\s]+/?")


class EngineList(Protocol):
    """Where the list comes from."""

    async def read(self) -> tuple[str, ...]:
        """URLs of the engines now, each once, in order.

        Raises:
            ListUnreadable: it cannot be had now; what it was before holds on.
        """
        ...


class FileList:
    """One URL a line; empty lines and those that begin with # are left out.

    What a file says counts when it says the same `SETTLE_S` later: an editor that writes it in
    place would otherwise take engines out, or have half a port, for a moment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refused: frozenset[str] = frozenset()
        self._settled = ""
        self._log = structlog.get_logger().bind(engines_file=str(path))

    async def read(self) -> tuple[str, ...]:
        """See `EngineList`."""
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                text = await self._settled_text()
        except (OSError, ValueError) as error:  # a time-out and bytes that are no text among them
            reason = str(error) or type(error).__name__
            raise ListUnreadable(f"engines_file: {self._path}: {reason}") from error
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        refused = frozenset(line for line in lines if not _is_place(line))
        for line in refused - self._refused:
            self._log.warning("engine_line_refused", line=line[:200], like="http://HOST:PORT")
        self._refused = refused
        return tuple(dict.fromkeys(line.rstrip("/") for line in lines if line not in refused))

    async def _settled_text(self) -> str:
        """What it says, if nobody is writing it."""
        text = await asyncio.to_thread(self._text)
        if text != self._settled:
            await asyncio.sleep(SETTLE_S)
            if await asyncio.to_thread(self._text) != text:
                raise ValueError("it is being written")
            self._settled = text
        return text

    def _text(self) -> str:
        with self._path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        return raw.decode()


class DnsList:
    """Every address of a name, with one port; an address goes when it was missing repeatedly."""

    def __init__(self, name: str, port: int) -> None:
        self._name, self._port = name, port
        self._missed: dict[str, int] = {}

    async def read(self) -> tuple[str, ...]:
        """See `EngineList`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(READ_DEADLINE_S):
                found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:  # the last: no name can be like that
            reason = str(error) or type(error).__name__
            raise ListUnreadable(f"engines_dns: {self._name}: {reason}") from error
        return self.take(str(address[0]) for *_, address in found)

    def take(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """The list after an answer with these addresses."""
        answered = {self._url(address) for address in addresses}
        missed = {url: count + 1 for url, count in self._missed.items() if count < MISSED_MAX}
        self._missed = missed | dict.fromkeys(answered, 0)
        return tuple(sorted(self._missed))

    def _url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{self._port}"


def _is_place(text: str) -> bool:
    """Whether this is like http://HOST:PORT, without a path, which no router could add."""
    return _PLACE.fullmatch(text) is not None and is_http(text)
