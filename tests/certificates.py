"""Certificates for tests: an authority, and what it has signed for 127.0.0.1."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Paths of PEM files; `key` belongs to `certificate`, which `authority` has signed."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """A new authority and one certificate, good for both ends of a connection."""
    folder.mkdir()
    authority, authority_key = folder / "ca.pem", folder / "ca.key"
    certificate, key, request = folder / "one.pem", folder / "one.key", folder / "one.csr"
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\n")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    _openssl(
        *("req", "-x509", *new_key, "-days", "2", "-subj", "/CN=test authority"),
        *("-keyout", str(authority_key), "-out", str(authority)),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    _openssl(
        *("req", *new_key, "-subj", "/CN=127.0.0.1", "-keyout", str(key), "-out", str(request))
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-days", "2", "-extfile", str(extensions)),
        *("-CA", str(authority), "-CAkey", str(authority_key), "-CAcreateserial"),
        *("-out", str(certificate)),
    )
    return Certificates(authority=authority, certificate=certificate, key=key)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=20)
