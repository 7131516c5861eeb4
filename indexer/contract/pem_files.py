"""PEM files of certificates, for routers and sidecars: loaded, or refused with a reason."""

import ssl
from pathlib import Path


class PemUnusable(Exception):  # noqa: N818 - names a condition
    """A file cannot be read or does not fit; the message names it and says why."""


def load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Have a context show a certificate.

    Args:
        context: of the connections.
        cert: PEM file, with its chain.
        key: PEM file of its key, without a passphrase.

    Raises:
        PemUnusable: the context may be left with half of them.
    """
    try:
        # With a passphrase OpenSSL would ask on the terminal, and wait.
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except (OSError, ValueError) as error:
        raise PemUnusable(f"{cert}, {key}: {_reason(error)}") from None


def load_authorities(context: ssl.SSLContext, path: str) -> None:
    """Have a context trust the authorities of a PEM file.

    Raises:
        PemUnusable: it cannot be used, or holds no certificate.
    """
    try:
        context.load_verify_locations(cafile=path)
    except (OSError, ValueError) as error:
        raise PemUnusable(f"{path}: {_reason(error)}") from None
    if not Path(path).is_file() or not context.cert_store_stats()["x509"]:
        raise PemUnusable(f"{path}: holds no certificate")


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; give one without")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not what belongs there, in PEM"
    return getattr(error, "strerror", None) or str(error)
