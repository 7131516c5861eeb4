"""Keys as files and options spell them, and what is said about those that cannot be used."""

import io
import json
from pathlib import Path

import pytest

from router.door import api_keys
from router.door.api_keys import KeyRing, KeysInvalid
from router.door.hash_key import hash_key
from router.door.options import DoorOptions
from router.door.reloading import ApiKeys
from router.door.visitor import Caller, KeyLimits, Rate, Visitor, digest_of, header_priority

KEY = "a-key-that-nobody-may-see"
HASH = digest_of(KEY).hex()
LIMITED = {
    "name": "one",
    "sha256": HASH,
    "requests_per_minute": 60,
    "requests_burst": 5,
    "tokens_per_minute": 1000,
    "concurrent_requests_max": 3,
    "models": ["m"],
    "priority_min": 10,
}
CALLER = Caller(
    name="one",
    limits=KeyLimits(
        requests=Rate(per_minute=60, burst=5),
        tokens=Rate(per_minute=1000, burst=1000),
        concurrent_requests_max=3,
    ),
    models=frozenset({"m"}),
    priority_min=10,
)


def read(folder: Path, text: str) -> KeyRing:
    """The keys of a file with this text."""
    path = folder / "keys"
    path.write_text(text)
    return KeyRing(api_keys.of_file(path))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(LIMITED),
        f"\n{json.dumps(LIMITED)}\n\n" + json.dumps({"name": "two", "sha256": "0" * 64}),
        json.dumps([LIMITED], indent=2),
        "# ours\n- {name: one, sha256: " + HASH.upper() + ", requests_per_minute: 60,\n"
        "   requests_burst: 5, tokens_per_minute: 1000, concurrent_requests_max: 3,\n"
        "   models: [m], priority_min: 10}\n",
    ],
)
def test_a_file_is_yaml_or_json_lines(tmp_path: Path, text: str) -> None:
    """The key opens, nothing else does."""
    ring = read(tmp_path, text)
    assert ring.find(KEY) == CALLER
    assert (ring.find(KEY + "x"), ring.find(""), ring.find(HASH)) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("one: two", "list"),
        ("- [", "line 2"),
        ('{"name": "a"}', "line 1: sha256"),
        ("{x", "line 1"),
        ("- {name: 2026-02-30}", "neither YAML"),
        ("- {name: 2026-01-01T99:99:99Z}", "neither YAML"),
        ("- {name: one, sha256: " + "1" * 5000 + "}", "neither YAML"),
        ("- !!timestamp x", "neither YAML"),
        (f"- {{name: one, sha256: {KEY}}}", "key 1: sha256"),
        (f"- {{name: one, sha256: '{HASH}', {KEY}: 1}}", "key 1: a field"),
        (f"- {KEY}", "key 1"),
        (f"- {{name: 'a b', sha256: '{HASH}'}}", "key 1: name"),
        (f"- {{name: one, sha256: '{HASH}', requests_per_minute: 0}}", "requests_per_minute"),
        (f"- {{name: one, sha256: '{HASH}', tokens_burst: 5}}", "tokens_burst needs"),
        (f"- {{name: one, sha256: '{HASH}', priority_min: 5000}}", "priority_min"),
        (f"- {{name: one, sha256: '{HASH}'}}\n- {{name: one, sha256: '{'0' * 64}'}}", "key 2"),
        (f"- {{name: one, sha256: '{HASH}'}}\n- {{name: two, sha256: '{HASH}'}}", "key 2"),
    ],
)
def test_a_bad_file_is_refused_without_quoting_it(tmp_path: Path, text: str, word: str) -> None:
    """The message names the file, the entry and the field; what is in it may be a key."""
    with pytest.raises(KeysInvalid) as caught:
        read(tmp_path, text)
    assert word in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert KEY not in str(caught.value)
    assert HASH not in str(caught.value)


def test_a_missing_or_huge_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a traceback."""
    with pytest.raises(KeysInvalid, match="cannot be read: No such file"):
        api_keys.of_file(tmp_path / "none")
    monkeypatch.setattr(api_keys, "FILE_BYTES_MAX", 10)
    with pytest.raises(KeysInvalid, match="larger"):
        read(tmp_path, " " * 11)


def test_options_hold_keys_or_hashes() -> None:
    """Separated by commas; white space around them is no part of them."""
    ring = KeyRing(api_keys.of_option(f"{KEY}, sha256:{digest_of('other').hex()}"))
    assert (ring.find(KEY), ring.find("other")) == (
        Caller(name="option-1"),
        Caller(name="option-2"),
    )
    for bad in ("a,,b", "", "sha256:12", "sha256:xyz"):
        with pytest.raises(KeysInvalid, match="api_keys: key"):
            api_keys.of_option(bad)
    with pytest.raises(KeysInvalid, match="admin_key"):
        api_keys.of_secret("", "admin_key")


def test_a_key_keeps_the_limits_of_its_file(tmp_path: Path) -> None:
    """Where it is also given as an option, which has none."""
    path = tmp_path / "keys"
    path.write_text(json.dumps(LIMITED))
    ring = ApiKeys(DoorOptions(api_keys_file=str(path), api_keys=f"{KEY},other")).ring
    assert (ring.find(KEY), ring.find("other")) == (CALLER, Caller(name="option-2"))


def test_hash_key_prints_what_a_file_takes() -> None:
    """Of one line from standard input; a key that could be guessed, or is several, is refused."""
    out = io.StringIO()
    assert hash_key(io.StringIO(f"{KEY}\n"), out) == 0
    assert out.getvalue() == f"{HASH}\n"
    for bad in ("", "short", "two keys with enough characters", "x" * 5000):
        assert hash_key(io.StringIO(bad), out) == 2
    assert out.getvalue() == f"{HASH}\n"


@pytest.mark.parametrize(
    ("header", "body", "caller", "expected"),
    [
        (None, b"{}", None, 0),
        (None, b'{"priority": -7}', None, -7),
        ("3", b'{"priority": -7}', None, 3),
        ("x", b'{"priority": 4}', None, 4),
        (None, b'{"x":"%s","priority" :-4 }' % (b"x" * 40_000), None, -4),
        (None, b'{"x":"%s\\"priority\\": 9, ","y":"priority"}' % (b"x" * 40_000), None, 0),
        (None, b'{"x":"%s","priority":%s}' % (b"x" * 40_000, b"9" * 5000), None, 0),
        ("-99999", b"{}", None, -1000),
        ("99999", b"{}", None, 1000),
        ("-5", b"{}", CALLER, 10),
        (None, b'{"priority": -5}', CALLER, 10),
        (None, b"{}", CALLER, 10),
        ("12", b"{}", CALLER, 12),
        (None, b'{"a": {"priority": 9}}', None, 0),
        (None, b'{"priority": true}', None, 0),
        (None, b'{"priority": "1"}', None, 0),
        (None, b'"priority"', None, 0),
        (None, b'{"priority": 1', None, 0),
    ],
)
def test_a_priority_is_the_headers_or_the_bodys(
    header: str | None, body: bytes, caller: Caller | None, expected: int
) -> None:
    """Held where it may be: by the bounds, and by what the key may have."""
    visitor = Visitor(caller=caller, asked_priority=header_priority(header))
    assert visitor.priority_of(body) == expected
