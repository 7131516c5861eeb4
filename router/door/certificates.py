"""TLS of this router's ports, and towards engines."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from indexer.contract.pem_files import PemUnusable, load_authorities, load_certificate
from router.door.options import DoorOptions


class CertificatesUnusable(Exception):  # noqa: N818 - names a condition
    """A PEM file cannot be read or does not fit; the message names the option."""


class ServerCertificates:
    """What this router shows to clients and asks of them; replaced for new connections by `reload`.

    Args:
        cert: PEM file, with its chain.
        key: PEM file of its key, without a passphrase.
        client_ca: PEM file of authorities, one of which must have signed a client's certificate.

    Raises:
        CertificatesUnusable: a file cannot be used.
    """

    def __init__(self, *, cert: str, key: str, client_ca: str | None) -> None:
        self._files = (cert, key, client_ca)
        self._current = self._load()
        self.context = self._load()
        self.context.sni_callback = self._hand_over

    @classmethod
    def of(cls, options: DoorOptions) -> "ServerCertificates | None":
        """As configured; None for plain HTTP.

        Raises:
            CertificatesUnusable: a file cannot be used.
        """
        if options.tls_cert is None or options.tls_key is None:
            return None
        return cls(cert=options.tls_cert, key=options.tls_key, client_ca=options.tls_client_ca)

    def reload(self) -> None:
        """Read the files again; connections that are open stay as they are.

        Raises:
            CertificatesUnusable: a file cannot be used; those read before stay in use.
        """
        self._current = self._load()

    def _hand_over(self, connection: Any, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        cert, key, client_ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        with _option("tls_cert, tls_key"):
            load_certificate(context, cert, key)
        if client_ca is not None:
            with _option("tls_client_ca"):
                load_authorities(context, client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would not be asked for its certificate again.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context


class EngineCertificates:
    """How certificates of engines are checked, and what is shown to those that ask for one.

    Attributes:
        context: of every connection to an engine.

    Args:
        ca: PEM file of authorities; None: the system's.
        cert: PEM file of the certificate that is shown, with its chain; None: there is none.
        key: PEM file of its key, without a passphrase.

    Raises:
        CertificatesUnusable: a file cannot be used.
    """

    def __init__(self, *, ca: str | None, cert: str | None, key: str | None) -> None:
        self._own = None if cert is None or key is None else (cert, key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if ca is None:
            self.context.load_default_certs()
        else:
            with _option("engine_ca"):
                load_authorities(self.context, ca)
        self.reload()

    @classmethod
    def of(cls, options: DoorOptions) -> "EngineCertificates | None":
        """As configured; None: the system's authorities, and nothing is shown.

        Raises:
            CertificatesUnusable: a file cannot be used.
        """
        if options.engine_ca is None and options.engine_cert is None:
            return None
        return cls(ca=options.engine_ca, cert=options.engine_cert, key=options.engine_key)

    def reload(self) -> None:
        """Read what is shown again; connections that are open stay as they are.

        Raises:
            CertificatesUnusable: a file cannot be used; those read before stay in use.
        """
        if self._own is None:
            return
        cert, key = self._own
        # Tried elsewhere first: one that fits no key would be left in use half.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.context):
            with _option("engine_cert, engine_key"):
                load_certificate(context, cert, key)


@contextmanager
def _option(name: str) -> Iterator[None]:
    """Files are refused in the name of their option."""
    try:
        yield
    except PemUnusable as error:
        raise CertificatesUnusable(f"{name}: {error}") from None
