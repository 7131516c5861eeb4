"""Files of certificates that cannot be used are named by their option."""

import ssl
from pathlib import Path

import pytest
from certificates import make_certificates

from indexer.config import SidecarConfig
from indexer.engine.engine_tls import engine_context
from indexer.errors import CertificatesUnusable


def test_nothing_given_is_the_systems(tmp_path: Path) -> None:
    """No context of its own; with an authority, one that checks."""
    assert engine_context(SidecarConfig()) is None
    authority = make_certificates(tmp_path / "one").authority
    context = engine_context(SidecarConfig(engine_ca=str(authority)))
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("content", [None, "", "text"], ids=["missing", "empty", "text"])
def test_unusable_authorities_are_named(tmp_path: Path, content: str | None) -> None:
    """With the path and a reason."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CertificatesUnusable, match=rf"^engine_ca: {path}: ."):
        engine_context(SidecarConfig(engine_ca=str(path)))


def test_a_key_of_another_certificate_is_named(tmp_path: Path) -> None:
    """With both options, as either may be the wrong one."""
    one, other = make_certificates(tmp_path / "one"), make_certificates(tmp_path / "other")
    config = SidecarConfig(engine_cert=str(one.certificate), engine_key=str(other.key))
    with pytest.raises(CertificatesUnusable, match=r"^engine_cert, engine_key: .*: KEY_VALUES"):
        engine_context(config)
