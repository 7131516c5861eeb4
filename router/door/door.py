"""The door as configured: everything that decides who comes in, made in one place."""

import ssl
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import structlog

from router.config import RouterConfig
from router.door import api_keys
from router.door.admission import Admission
from router.door.api_keys import KeyRing
from router.door.certificates import EngineCertificates, ServerCertificates
from router.door.engine_headers import EngineHeaders
from router.door.options import asks_for_keys
from router.door.reloading import ApiKeys, Reloading

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What the rest of the router asks and shows.

    Attributes:
        admission: bounds, and the line in front of them.
        keys: of clients; None where none are asked for.
        admin: the operators' key; None where they need none.
        certificates: of this router's ports; None for plain HTTP.
        engine_tls: of connections to engines; None: as the system checks their certificates.
        engine_headers: what engines see of clients' credentials.
        reloading: reads keys and certificates again.
    """

    admission: Admission
    keys: ApiKeys | None
    admin: KeyRing | None
    certificates: ServerCertificates | None
    engine_tls: ssl.SSLContext | None
    engine_headers: EngineHeaders
    reloading: Reloading

    def engine_session(self, **options: Any) -> aiohttp.ClientSession:
        """A session for this router's own questions to engines; options as aiohttp's."""
        connector = aiohttp.TCPConnector(ssl=self.engine_tls or True)
        headers = self.engine_headers.of({})
        return aiohttp.ClientSession(connector=connector, headers=headers, **options)

    @classmethod
    def of(cls, config: RouterConfig) -> Self:
        """Read keys and certificates, and say who will be let in.

        Raises:
            KeysInvalid, CertificatesUnusable: with the option's name and what to change.
        """
        keys = ApiKeys(config) if asks_for_keys(config) else None
        admin = (
            None if config.admin_key is None else api_keys.of_secret(config.admin_key, "admin_key")
        )
        certificates = ServerCertificates.of(config)
        engine_certificates = EngineCertificates.of(config)
        if keys is None:
            log.info("door_open", reason="no api_keys_file and no api_keys: nobody needs a key")
        else:
            log.info("door_keyed", keys_count=len(keys.ring))
        return cls(
            admission=Admission(
                requests_max=config.in_flight_requests_max,
                bytes_max=config.in_flight_bytes_max,
                queue_requests_max=config.queue_requests_max,
                queue_deadline_s=config.queue_deadline_s,
            ),
            keys=keys,
            admin=admin,
            certificates=certificates,
            engine_tls=None if engine_certificates is None else engine_certificates.context,
            engine_headers=EngineHeaders(config),
            reloading=Reloading(keys, certificates, engine_certificates),
        )
