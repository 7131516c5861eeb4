"""Who comes in, with which rights, and how important the request is. Pure."""

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from pydantic_core import from_json

from router.door.waiting_line import held_priority
from router.errors import ModelForbidden

PRIORITY_DEFAULT: Final = 0
_PRIORITY_FIELD: Final = b'"priority"'
_PRIORITY: Final = re.compile(rb'"priority"[ \t\r\n]*+:[ \t\r\n]*+(-?[0-9]{1,9})[ \t\r\n]*+[,}]')

READ_BYTES_MAX: Final = 32 * 1024
"""A longer body is searched for the field instead of being read: reading one of 16 MB would hold up
everybody for half a second, just when many wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So much a minute, and so much at once.

    Attributes:
        per_minute: admitted in the long run.
        burst: admitted at once by whoever has been idle; over any time of w minutes never more than
            per_minute x w + burst.
    """

    per_minute: int
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may use; None: as much as it likes.

    Attributes:
        requests: of any kind that reaches an engine.
        tokens: prompt tokens when a request is admitted, output tokens when it has ended.
        concurrent_requests_max: in flight or waiting at all routers together.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrent_requests_max: int | None = None

    def __bool__(self) -> bool:
        return bool(self.requests or self.tokens or self.concurrent_requests_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom a key belongs to, and what it allows.

    Attributes:
        name: for logs, metrics and limits; no secret.
        limits: of all its requests together.
        models: names it may ask for; None for all.
        priority_min: the most important priority it may have.
    """

    name: str
    limits: KeyLimits = KeyLimits()
    models: frozenset[str] | None = None
    priority_min: int = PRIORITY_DEFAULT

    def may_use(self, model: str) -> bool:
        """Whether requests for this model are served."""
        return self.models is None or model in self.models

    def refuse_model(self, model: str) -> None:
        """Refuse a request for a model that the key is not for.

        Raises:
            ModelForbidden: it is none of its models.
        """
        if not self.may_use(model):
            raise ModelForbidden(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A request at the door, before its body is read.

    Attributes:
        caller: whose key it came with; None where keys are not asked for.
        asked_priority: by its header; None without one.
    """

    caller: Caller | None = None
    asked_priority: int | None = None

    @property
    def caller_name(self) -> str | None:
        """Whose request it is; None where keys are not asked for."""
        return None if self.caller is None else self.caller.name

    def priority_of(self, body: bytes) -> int:
        """By its header, else by the field `priority` of its body, which is vLLM's."""
        if self.asked_priority is not None:
            return self._held(self.asked_priority)
        return self._held(_body_priority(body))

    def _held(self, priority: int) -> int:
        if self.caller is None:
            return held_priority(priority)
        return held_priority(priority, most_important=self.caller.priority_min)


ANYBODY: Final = Visitor()
"""Without a key, and no more important than others."""


def header_priority(value: str | None) -> int | None:
    """The number in a header; None where there is none."""
    try:
        return None if value is None else int(value[:8])
    except ValueError:
        return None


def _body_priority(body: bytes) -> int:
    """Asked only of a request that has to wait, so it may cost reading the JSON once more."""
    if _PRIORITY_FIELD not in body:
        return PRIORITY_DEFAULT
    if len(body) > READ_BYTES_MAX:  # where it stands does not matter: the client writes all of it
        return int(([b"0", *_PRIORITY.findall(body)])[-1])
    try:
        fields = from_json(body)
    except ValueError:
        return PRIORITY_DEFAULT
    priority = fields.get("priority") if isinstance(fields, dict) else None
    return priority if type(priority) is int else PRIORITY_DEFAULT


def digest_of(key: str) -> bytes:
    """How a key is kept: SHA-256, enough for keys that are long and random."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
