"""TLS towards engines: whom to trust, and what to show to those that ask for a certificate."""

import ssl

from indexer.config import SidecarConfig
from indexer.errors import CertificatesUnusable


def engine_context(config: SidecarConfig) -> ssl.SSLContext | None:
    """Of every connection to an engine; None: the system's authorities, and nothing is shown.

    Raises:
        CertificatesUnusable: a file cannot be used; the message names the option.
    """
    if config.engine_ca is None and config.engine_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    used = f"engine_ca: {config.engine_ca}"
    try:
        if config.engine_ca is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(cafile=config.engine_ca)
        if config.engine_cert is not None and config.engine_key is not None:
            used = f"engine_cert, engine_key: {config.engine_cert}, {config.engine_key}"
            # With a passphrase OpenSSL would ask on the terminal, and wait.
            context.load_cert_chain(config.engine_cert, config.engine_key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise CertificatesUnusable(f"{used}: {_said(error)}") from None
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one without")


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not what belongs there, in PEM"
    return getattr(error, "strerror", None) or str(error)
