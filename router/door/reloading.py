"""Keys and certificates that change while the router runs: on SIGHUP, keys also with their file."""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import structlog

from router.door import api_keys
from router.door.api_keys import KeyRing, KeysInvalid
from router.door.certificates import CertificatesUnusable, EngineCertificates, ServerCertificates
from router.door.options import DoorOptions

log = structlog.get_logger()

LOOK_EVERY_S: Final = 2.0
"""How soon a changed file of keys is seen. Looking at it, unlike waiting for events of the file
system, also shows a mounted secret that is replaced as a whole."""

Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys of clients as they are now.

    Attributes:
        ring: replaced as a whole; a request keeps what it was admitted with.

    Raises:
        KeysInvalid: the configured ones cannot be used.
    """

    def __init__(self, options: DoorOptions) -> None:
        self._file = None if options.api_keys_file is None else Path(options.api_keys_file)
        self._fixed = {} if options.api_keys is None else api_keys.of_option(options.api_keys)
        self._stamp = self._look()
        self.ring = self._read()

    def changed(self) -> bool:
        """Whether the file is another one than at the last look."""
        stamp, self._stamp = self._stamp, self._look()
        return stamp != self._stamp

    def reload(self) -> None:
        """Read the file again.

        Raises:
            KeysInvalid: it cannot be used; the keys read before stay in use.
        """
        self.ring = self._read()

    def _read(self) -> KeyRing:
        listed = {} if self._file is None else api_keys.of_file(self._file)
        return KeyRing(self._fixed | listed)  # a key with limits keeps them

    def _look(self) -> Stamp | None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                state = self._file.stat()
                return state.st_mtime_ns, state.st_size, state.st_ino
        return None


class Reloading:
    """Reads again what may change.

    Args:
        keys: of clients; None where none are asked for.
        certificates: of this router; None for plain HTTP.
        engine_certificates: what it shows to engines; None where it shows nothing.
    """

    def __init__(
        self,
        keys: ApiKeys | None,
        certificates: ServerCertificates | None,
        engine_certificates: EngineCertificates | None = None,
    ) -> None:
        self._keys = keys
        self._certificates = [one for one in (certificates, engine_certificates) if one is not None]
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Read everything again soon."""
        self._asked.set()

    async def run(self) -> None:
        """Do so when asked, and look at the file of keys meanwhile, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            if self._keys is not None and (await asyncio.to_thread(self._keys.changed) or asked):
                await self._reload_keys(self._keys)
            for certificates in self._certificates if asked else ():
                await self._reload_certificates(certificates)

    async def _reload_keys(self, keys: ApiKeys) -> None:
        try:
            await asyncio.to_thread(keys.reload)
        except KeysInvalid as error:
            log.error("api_keys_not_reloaded", error=str(error))  # noqa: TRY400 - no traceback is wanted
        else:
            log.info("api_keys_reloaded", keys_count=len(keys.ring))

    async def _reload_certificates(
        self, certificates: ServerCertificates | EngineCertificates
    ) -> None:
        try:
            await asyncio.to_thread(certificates.reload)
        except CertificatesUnusable as error:
            log.error("certificates_not_reloaded", error=str(error))  # noqa: TRY400 - likewise
        else:
            log.info("certificates_reloaded")
