"""TLS towards engines: whom to trust, and what to show to those that ask for a certificate."""

import ssl

from indexer.config import SidecarConfig
from indexer.contract.pem_files import PemUnusable, load_authorities, load_certificate
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
    option = "engine_ca"
    try:
        if config.engine_ca is None:
            context.load_default_certs()
        else:
            load_authorities(context, config.engine_ca)
        if config.engine_cert is not None and config.engine_key is not None:
            option = "engine_cert, engine_key"
            load_certificate(context, config.engine_cert, config.engine_key)
    except PemUnusable as error:
        raise CertificatesUnusable(f"{option}: {error}") from None
    return context
