"""Pure: typed reading of the fields of one JSON row. Every fault is a ValueError with a reason."""

import json
from collections.abc import Mapping
from typing import cast

Fields = Mapping[str, object]
INTEGER_MAX = (1 << 63) - 1
LINE_BYTES_MAX = 32 << 20  # a prompt of a million token ids is about 8 MB of JSON


def parse_object(line: bytes) -> Fields:
    """The JSON object of one line. Raises ValueError."""
    if len(line) > LINE_BYTES_MAX:
        raise ValueError(f"line is longer than {LINE_BYTES_MAX} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")  # noqa: TRY004
    return fields


def number(fields: Fields, name: str) -> float:
    """A finite or infinite float from a JSON number."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")  # noqa: TRY004
    try:
        return float(value)
    except OverflowError as exc:
        raise ValueError(f"{name} is too large") from exc


def integer(fields: Fields, name: str) -> int:
    """An integer from 0 to 2^63 - 1."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INTEGER_MAX:
        raise ValueError(f"{name} must be an integer >= 0, got {value!r:.60}")
    return value


def integers(fields: Fields, name: str) -> tuple[int, ...]:
    """At least one integer, each from 0 to 2^63 - 1."""
    values = fields.get(name)
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} must be a list of integers with at least one")
    return checked_integers(values, name)


def checked_integers(values: list[object], name: str) -> tuple[int, ...]:
    """The list as a tuple of integers from 0 to 2^63 - 1; it may be empty."""
    # Whole-list operations: traces have tens of millions of ids.
    if not set(map(type, values)) <= {int}:
        raise ValueError(f"{name} must hold integers from 0 to 2^63 - 1 only")
    integers_only = cast("list[int]", values)
    if values and not (min(integers_only) >= 0 and max(integers_only) <= INTEGER_MAX):
        raise ValueError(f"{name} must hold integers from 0 to 2^63 - 1 only")
    return tuple(integers_only)


def text(fields: Fields, name: str) -> str:
    """A string."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")  # noqa: TRY004
    return value


def optional_text(fields: Fields, name: str) -> str | None:
    """A string, or None when the field is absent or null."""
    return None if fields.get(name) is None else text(fields, name)


def optional_number(fields: Fields, name: str) -> float | None:
    """A number, or None when the field is absent or null."""
    return None if fields.get(name) is None else number(fields, name)


def objects(fields: Fields, name: str) -> list[Fields]:
    """A list of JSON objects; it may be empty."""
    values = fields.get(name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{name} must be a list of objects")
    return values
