"""Options of the door: what excludes what, what cannot be used, what is never shown."""

import sys
from pathlib import Path

import pytest
from certificates import make_certificates

from router.__main__ import main
from router.config import RouterConfig, loggable, parse_config
from router.door.certificates import CertificatesUnusable, EngineCertificates, ServerCertificates
from router.door.options import SECRETS, DoorOptions


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--tls_cert", "x"], "tls_key"),
        (["--tls_client_ca", "x"], "tls_client_ca"),
        (["--engine_cert", "x"], "engine_key"),
        (["--allowed_origins", '["chat.example"]'], "allowed_origins"),
        (["--allowed_origins", '["https://chat.example/"]'], "allowed_origins"),
        (["--forward_authorization", "true"], "api_keys"),
        (
            ["--forward_authorization=true", "--api_keys=a", "--engine_api_key=b"],
            "engine_api_key",
        ),
        (["--queue_deadline_s", "0"], "queue_deadline_s"),
        (["--connections_max", "0"], "connections_max"),
    ],
)
def test_what_does_not_go_together_ends_the_start(
    args: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the option in the message."""
    with pytest.raises(SystemExit) as caught:
        parse_config(args)
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--api_keys", "sha256:S3cret"], "api_keys: key 1"),
        (["--api_keys_file", "/nonexistent"], "api_keys_file"),
        (["--admin_key", ""], "admin_key"),
        (["--tls_cert", "/nonexistent", "--tls_key", "/nonexistent"], "tls_cert"),
        (["--engine_ca", "/nonexistent"], "engine_ca"),
        (["--engine_cert", "/nonexistent", "--engine_key", "/nonexistent"], "engine_cert"),
    ],
)
def test_what_cannot_be_used_ends_the_start(
    args: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Redis is looked for; likewise, and without quoting it."""
    assert main([*args, "--redis_url", "unix:///nonexistent", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "S3cret" not in err
    assert "Traceback" not in err


def test_secrets_are_masked() -> None:
    """Where the configuration is logged, and where it is printed by mistake."""
    config = RouterConfig(**dict.fromkeys(SECRETS, "S3cret"), redis_url="redis://:S3cret@h:1")
    assert "S3cret" not in str(loggable(config))
    assert all(loggable(config)[name] == "***" for name in SECRETS)
    shown = repr(RouterConfig(**dict.fromkeys(SECRETS, "S3cret")))
    assert "S3cret" not in shown


def test_certificates_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """A key of another certificate, a key with a passphrase, a file that is none."""
    one, other = make_certificates(tmp_path / "one"), make_certificates(tmp_path / "other")
    (tmp_path / "text").write_text("text")
    for cert, key in ((one.certificate, other.key), (tmp_path / "text", one.key)):
        with pytest.raises(CertificatesUnusable, match="tls_cert, tls_key"):
            ServerCertificates(cert=str(cert), key=str(key), client_ca=None)
    with pytest.raises(CertificatesUnusable, match="tls_client_ca"):
        ServerCertificates(
            cert=str(one.certificate), key=str(one.key), client_ca=str(tmp_path / "text")
        )
    with pytest.raises(CertificatesUnusable, match="engine_ca"):
        EngineCertificates.of(DoorOptions(engine_ca=str(tmp_path / "text")))
    with pytest.raises(CertificatesUnusable, match="engine_cert"):  # another key's
        EngineCertificates(ca=None, cert=str(one.certificate), key=str(other.key))


def test_hash_key_is_a_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of `python -m router`; it reads standard input and says the hash alone."""
    (tmp_path / "key").write_text("a-key-of-enough-characters\n")
    with (tmp_path / "key").open() as keys:
        monkeypatch.setattr(sys, "stdin", keys)
        assert main(["hash-key"]) == 0
    out = capsys.readouterr()
    assert (len(out.out), out.err) == (65, "")
