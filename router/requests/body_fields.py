"""JSON bodies and their fields: read, checked, and named where they are wrong. Pure."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from router.errors import RequestInvalid
from router.requests.long_ids import put_back, set_aside

MESSAGES_MAX: Final = 16_384
"""Messages in one conversation; a template walks over all of them."""

STRUCTURE_MAX: Final = 1 << 18
"""Lists, objects and fields in one body. A JSON reader holds the interpreter's lock to its end, and
16 MB of empty lists hold it for two seconds; a conversation of MESSAGES_MAX messages has a third of
this."""

_STRUCTURE: Final = re.compile(
    rb"""[^"\[{:]*+(?:"(?:[^"\\]++|\\.)*+"[^"\[{:]*+)*+[\[{:]""", re.DOTALL
)
"""Up to the next one that is not within a text."""

MODEL_CHARACTERS_MAX: Final = 1024
"""Of a model, as clients spell it."""

PROBLEMS_SHOWN_MAX: Final = 3

NAME_SHOWN_MAX: Final = 128
"""Characters of a client's own key that go back in a message."""


B = TypeVar("B", bound=BaseModel)

ModelName = Annotated[str, Field(min_length=1, max_length=MODEL_CHARACTERS_MAX)]


class Body(BaseModel):
    """What most bodies have; everything else in them is the engine's business.

    Lists stop at their first problem (`fail_fast`): a body of a million bad elements costs no more
    than a good one.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    model: ModelName | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: str | None = None

    @property
    def truncates_end(self) -> bool:
        """Whether the prompt loses its last tokens, not its first ones as usual."""
        return self.truncation_side == "right" and self.truncate_prompt_tokens is not None


def json_object(body: bytes) -> dict[str, Any]:
    """The object that a body holds; of a repeated key the last one counts, as in the engine.

    A long list of token ids in it is a `LongIds`.

    Raises:
        RequestInvalid: it is none.
    """
    if not body:
        raise RequestInvalid("The request body is empty: send a JSON object.")
    short, lists = set_aside(body)
    if is_scattered(short):
        raise RequestInvalid(
            f"The request body has more than {STRUCTURE_MAX} lists, objects and fields. Send fewer."
        )
    try:
        fields = from_json(short, allow_inf_nan=False)
    except ValueError as error:
        raise RequestInvalid(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestInvalid(f"The request body must be a JSON object, not {kind(fields)}.")
    put_back(fields, lists)
    return fields


def is_scattered(body: bytes) -> bool:
    """Whether reading this JSON would take much longer than its length tells: STRUCTURE_MAX."""
    if len(body) <= STRUCTURE_MAX or sum(map(body.count, (b"[", b"{", b":"))) <= STRUCTURE_MAX:
        return False
    at = 0
    for _ in range(STRUCTURE_MAX + 1):  # one after the other: other threads go on in between
        found = _STRUCTURE.match(body, at)
        if found is None:
            return False
        at = found.end()
    return True


def checked(model: type[B], fields: dict[str, Any]) -> B:
    """Fields as this model has them.

    Raises:
        RequestInvalid: with the field's name and what is expected of it.
    """
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _as_invalid(error) from None


def invalid(name: str, problem: str) -> RequestInvalid:
    """The field of this name has this problem."""
    return RequestInvalid(f"{name}: {problem}.", param=name)


def refuse_empty(value: Sequence[object], name: str) -> None:
    """Refuse an empty text or list.

    Raises:
        RequestInvalid: it is empty.
    """
    if not value:
        raise invalid(name, "must not be empty")


def branch(value: object) -> str:
    """Which branch of a union a value means; the tag shows in locations and is taken out there."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else "<other>"


def kind(value: object) -> str:
    """A value as a message names it."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {value!r}"[:60]
        case str():
            return "a string" if value else "an empty string"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"


def _as_invalid(error: ValidationError) -> RequestInvalid:
    problems = error.errors(include_url=False, include_context=False)
    lines = [_line(problem) for problem in problems[:PROBLEMS_SHOWN_MAX]]
    if len(problems) > PROBLEMS_SHOWN_MAX:
        lines.append(f"and {len(problems) - PROBLEMS_SHOWN_MAX} more")
    return RequestInvalid("; ".join(lines) + ".", param=_path(problems[0]["loc"]) or None)


_EXPECTED: Final = {
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "too_short": "must not be empty",
    "too_long": f"must hold at most {MESSAGES_MAX}",
    "dict_type": "must be an object",
}


def _line(problem: Any) -> str:
    path = _path(problem["loc"])
    if problem["type"] == "missing":
        return f"{path}: is required"
    expected = _EXPECTED.get(problem["type"], problem["msg"].replace("Input should", "must"))
    return f"{path}: {expected} (got {kind(problem['input'])})"


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 1, "content", "<list>", 0)` -> `messages[1].content[0]`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            shown = step[:NAME_SHOWN_MAX]
            path += f".{shown}" if path else shown
    return path
