"""Keys of clients and operators: read from a file or an option, kept as hashes, looked up blindly.

The file is a YAML list, or one JSON object a line:

    - name: batch-jobs                      # in logs and metrics; unique
      sha256: 9f86d081884c7d65...           # python -m router hash-key
      requests_per_minute: 600              # this and all below: no limit when left out
      requests_burst: 100                   # at once; default: a minute's
      tokens_per_minute: 2000000            # of prompts when admitted, of outputs when ended
      tokens_burst: 2000000
      concurrent_requests_max: 64
      models: [llama, llama-adapter]        # others are refused; default: all
      priority_min: 10                      # lower is more important; default: 0
"""

import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from pydantic_core import from_json

from router.door.visitor import Caller, KeyLimits, Rate, digest_of
from router.door.waiting_line import PRIORITY_MAX, PRIORITY_MIN

FILE_BYTES_MAX: Final = 16 * 1024 * 1024
KEYS_MAX: Final = 20_000
"""The file is read again whenever it changes, in a thread beside the requests."""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

HASH_PREFIX: Final = "sha256:"
"""In front of a hash that is given in place of a key."""


class KeysInvalid(Exception):  # noqa: N818 - names a condition
    """Keys that cannot be used; the message says where and why, and holds none of them."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    requests_per_minute: PositiveInt | None = None
    requests_burst: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    tokens_burst: PositiveInt | None = None
    concurrent_requests_max: PositiveInt | None = None
    models: list[str] | None = None
    priority_min: Annotated[int, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = 0

    def caller(self) -> Caller:
        """Whom it describes."""
        return Caller(
            name=self.name,
            limits=KeyLimits(
                requests=_rate(self.requests_per_minute, self.requests_burst),
                tokens=_rate(self.tokens_per_minute, self.tokens_burst),
                concurrent_requests_max=self.concurrent_requests_max,
            ),
            models=None if self.models is None else frozenset(self.models),
            priority_min=self.priority_min,
        )


class KeyRing:
    """Keys, none of which can be told from how long a look-up takes.

    Whoever tries keys does not know under what they are filed here: it is a digest keyed with a
    secret of this process.
    """

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers = {
            self._blinded(digest): (digest, caller) for digest, caller in callers.items()
        }

    def __len__(self) -> int:
        return len(self._callers)

    def find(self, key: str) -> Caller | None:
        """Whom a key belongs to, or None."""
        digest = digest_of(key)
        found = self._callers.get(self._blinded(digest))
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        return found[1]

    def callers(self) -> list[Caller]:
        """All of them."""
        return [caller for _, caller in self._callers.values()]

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def of_option(option: str) -> dict[bytes, Caller]:
    """Keys, or hashes of keys, separated by commas; without limits.

    Raises:
        KeysInvalid: one is empty or no hash.
    """
    callers: dict[bytes, Caller] = {}
    for number, one in enumerate(option.split(","), 1):
        callers[_digest(one.strip(), f"api_keys: key {number}")] = Caller(name=f"option-{number}")
    return callers


def of_secret(value: str, option: str) -> KeyRing:
    """One key, or its hash.

    Raises:
        KeysInvalid: it is empty or no hash.
    """
    return KeyRing({_digest(value.strip(), option): Caller(name=option)})


def of_file(path: Path) -> dict[bytes, Caller]:
    """Read a file of keys.

    Raises:
        KeysInvalid: it cannot be read or used; says which entry and field.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise KeysInvalid(f"api_keys_file: {path} is larger than {FILE_BYTES_MAX} bytes")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise KeysInvalid(f"api_keys_file: {path} cannot be read: {reason}") from None
    return _callers(_entries(text, path), path)


def _entries(text: str, path: Path) -> Iterable[tuple[str, Any]]:
    """Each with what a message calls it. Parsers quote what they read, so they are not quoted."""
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", from_json(line)
            except ValueError:
                raise KeysInvalid(f"api_keys_file: {path}: line {number}: no JSON object") from None
        return
    try:
        entries = yaml.load(text, _LOADER)  # noqa: S506 - a safe loader
    except Exception as error:  # noqa: BLE001 - of what only looks like a date it raises others
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}"
        raise KeysInvalid(f"api_keys_file: {path}: neither YAML nor JSON lines{where}") from None
    if not isinstance(entries, list):
        raise KeysInvalid(f"api_keys_file: {path}: must be a list of keys, each with its fields")
    yield from ((f"key {number}", one) for number, one in enumerate(entries, 1))


def _callers(entries: Iterable[tuple[str, Any]], path: Path) -> dict[bytes, Caller]:
    callers: dict[bytes, Caller] = {}
    names: set[str] = set()
    for where, one in entries:
        if len(callers) >= KEYS_MAX:
            raise KeysInvalid(f"api_keys_file: {path}: more than {KEYS_MAX} keys")
        try:
            entry = _Entry.model_validate(one)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False, include_context=False)[0]
            field = ".".join(str(part) for part in problem["loc"]) or "it"
            if problem["type"] == "extra_forbidden":
                field = "a field"  # its name may be a key that was put in the wrong place
            raise KeysInvalid(
                f"api_keys_file: {path}: {where}: {field}: {problem['msg']}"
            ) from None
        for limit in ("requests", "tokens"):
            if getattr(entry, f"{limit}_burst") and not getattr(entry, f"{limit}_per_minute"):
                raise KeysInvalid(
                    f"api_keys_file: {path}: {where}: {limit}_burst needs {limit}_per_minute"
                )
        digest = bytes.fromhex(entry.sha256)
        if entry.name in names or digest in callers:
            raise KeysInvalid(f"api_keys_file: {path}: {where}: the name or key is there already")
        names.add(entry.name)
        callers[digest] = entry.caller()
    return callers


def _digest(value: str, where: str) -> bytes:
    if value.startswith(HASH_PREFIX):
        try:
            digest = bytes.fromhex(value.removeprefix(HASH_PREFIX))
        except ValueError:
            digest = b""
        if len(digest) != len(digest_of("")):
            raise KeysInvalid(f"{where}: behind {HASH_PREFIX} belong 64 hexadecimal digits")
        return digest
    if not value:
        raise KeysInvalid(f"{where}: is empty")
    return digest_of(value)


def _rate(per_minute: int | None, burst: int | None) -> Rate | None:
    return None if per_minute is None else Rate(per_minute=per_minute, burst=burst or per_minute)
