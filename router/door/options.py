"""What an operator says about who may come in; part of the router's configuration."""

import re
from dataclasses import dataclass, field
from typing import Final

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*A-Z]+")

SECRETS: Final = frozenset({"api_keys", "admin_key", "engine_api_key"})
"""Options that are never shown."""


@dataclass(frozen=True, kw_only=True)
class DoorOptions:
    """Keys, limits, certificates and connections.

    Args:
        queue_requests_max: requests that may wait for a place among in_flight_requests_max;
            beyond, 429; 0: none waits
        queue_deadline_s: how long one may wait; then 503
        api_keys_file: names, hashes and limits of the keys that clients must have: a YAML list or
            JSON lines, read again when it changes and on SIGHUP
        api_keys: keys without limits, or sha256:HASH of them, separated by commas
        admin_key: key, or sha256:HASH of one, without which /metrics, /fleet, /dashboard, /route
            and /admin are refused; without it /admin is refused on the port for clients
        forward_authorization: pass the client's key on to engines, though keys are checked here
        engine_api_key: what engines ask for (vLLM's --api-key), sent in place of the client's
        tls_cert: PEM file of the certificate of both ports, with its chain; read again on SIGHUP
        tls_key: PEM file of its key
        tls_client_ca: PEM file of authorities; clients without a certificate of theirs are refused
        engine_ca: PEM file of authorities of engines with https URLs; the system's by default
        engine_cert: PEM file of the certificate shown to engines that ask for one, with its chain;
            read again on SIGHUP
        engine_key: PEM file of its key
        allowed_origins: origins whose web pages may ask as clients do, such as
            '["https://chat.example"]'; '["*"]' is all, as with vLLM. None when not given
        connections_max: connections of clients; beyond, they are answered 503 and closed
        header_timeout_s: headers must have arrived within this, and a TLS handshake be done
        client_keepalive_s: an unused connection of a client is closed after this
    """

    queue_requests_max: NonNegativeInt = 256
    queue_deadline_s: PositiveFloat = 10.0
    api_keys_file: str | None = None
    api_keys: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    forward_authorization: bool = False
    engine_api_key: str | None = field(default=None, repr=False)
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    engine_ca: str | None = None
    engine_cert: str | None = None
    engine_key: str | None = None
    allowed_origins: tuple[str, ...] = ()
    connections_max: PositiveInt = 16_384
    header_timeout_s: PositiveFloat = 10.0
    client_keepalive_s: PositiveFloat = 75.0


def asks_for_keys(options: DoorOptions) -> bool:
    """Whether clients must have one."""
    return options.api_keys_file is not None or options.api_keys is not None


def check_door(options: DoorOptions) -> None:
    """Check what holds between these values.

    Raises:
        ValueError: naming the option.
    """
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("tls_key: tls_cert and tls_key belong together: give both or neither")
    if (options.engine_cert is None) != (options.engine_key is None):
        raise ValueError(
            "engine_key: engine_cert and engine_key belong together: give both or neither"
        )
    for origin in options.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"allowed_origins: `{origin}` is not like https://HOST or https://HOST:PORT, as "
                "browsers write it, or *"
            )
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise ValueError("tls_client_ca: needs tls_cert and tls_key")
    if options.forward_authorization and options.engine_api_key is not None:
        raise ValueError(
            "forward_authorization: excludes engine_api_key, which takes the key's place"
        )
    if options.forward_authorization and not asks_for_keys(options):
        raise ValueError(
            "forward_authorization: needs api_keys_file or api_keys; without keys the client's is "
            "passed on anyway"
        )


def masked(name: str, value: object) -> object:
    """A value as it may be logged."""
    return "***" if name in SECRETS and value is not None else value
