"""Body and headers of a completion request -> `ApiCall`, or a message that says what to change.

Only what routing needs is taken out and checked, plus the types of the common fields; everything
else is the engine's business, and the body itself goes on byte for byte.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NotRequired

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    with_config,
)
from pydantic_core import from_json
from typing_extensions import TypedDict

from indexer.contract.block_hash import pack_tokens
from router import headers as names
from router.errors import RequestInvalid
from router.requests.api_call import ApiCall, ChatPrompt, Endpoint, Prompt, TextPrompt, TokenPrompt

PROMPTS_MAX: Final = 1024
"""Prompts in one request; each is tokenized and counted."""

MESSAGES_MAX: Final = 16_384
"""Messages in one conversation; a template walks over all of them."""

PROBLEMS_SHOWN_MAX: Final = 3

_PRINTABLE: Final = re.compile(r"[\x21-\x7e]{1,128}")
_SESSION: Final = re.compile(r"[\x20-\x7e]{1,256}")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's request id when it is printable and at most 128 characters, else a new one."""
    given = headers.get(names.REQUEST_ID, "")
    return given if _PRINTABLE.fullmatch(given) else uuid.uuid4().hex


def parse(
    body: bytes, headers: Mapping[str, str], *, request_id: str, endpoint: Endpoint | None = None
) -> ApiCall:
    """Check a request and take out what routing needs.

    Args:
        body: JSON as received.
        headers: the client's, case-insensitive.
        request_id: from `request_id`.
        endpoint: where it came in; None: told by its content (`messages` or `prompt`).

    Raises:
        RequestInvalid: with the field's name and what is expected of it.
    """
    fields = _json_object(body)
    if endpoint is None:
        endpoint = Endpoint.CHAT if "messages" in fields else Endpoint.COMPLETIONS
    checked: _ChatBody | _CompletionBody
    prompt: Prompt
    try:
        if endpoint is Endpoint.CHAT:
            checked = _ChatBody.model_validate(fields)
            prompt = _chat_prompt(checked)
        else:
            checked = _CompletionBody.model_validate(fields)
            prompt = _completion_prompt(fields.get("prompt"), checked.add_special_tokens)
    except ValidationError as error:
        raise _as_invalid(error) from None
    session = headers.get(names.SESSION, "")
    return ApiCall(
        endpoint=endpoint,
        body=body,
        headers=tuple(headers.items()),
        request_id=request_id,
        model=checked.model,
        stream=bool(checked.stream),
        prompt=prompt,
        prompts_count=1 if isinstance(prompt, ChatPrompt) else len(_parts(prompt)),
        choices_count=checked.n or 1,
        reads_prefixes=not checked.wants_prompt_logprobs(),
        turn=_turn(prompt),
        cache_salt=checked.cache_salt,
        output_tokens_max=checked.max_completion_tokens or checked.max_tokens,
        truncate_prompt_tokens=checked.truncate_prompt_tokens,
        session_id=session if _SESSION.fullmatch(session) else None,
        policy=headers.get(names.POLICY),
        explain=headers.get(names.EXPLAIN, "").lower() in {"1", "true"},
    )


# -- shape ----------------------------------------------------------------------------------------


# Lists stop at their first problem: a body of a million bad elements costs no more than a good one.


def _kind(value: object) -> str:
    """Which branch of a union a value means; the tag shows in locations and is taken out there."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else "<other>"


@with_config(ConfigDict(extra="allow", strict=True))
class _Part(TypedDict):
    type: Annotated[str, Field(min_length=1)]
    text: NotRequired[str]


@with_config(ConfigDict(extra="allow", strict=True))
class _Message(TypedDict):
    role: Annotated[str, Field(min_length=1)]
    content: NotRequired[
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[_Part], Field(fail_fast=True), Tag("<list>")],
            Discriminator(
                _kind,
                custom_error_type="content_type",
                custom_error_message="must be a string or a list of content parts",
            ),
        ]
        | None
    ]
    tool_calls: NotRequired[Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None]


class _Common(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: (
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[str], Field(fail_fast=True), Tag("<list>")],
            Discriminator(
                _kind,
                custom_error_type="stop_type",
                custom_error_message="must be a string or a list of strings",
            ),
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    seed: int | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_logprobs: Any = None  # this and the next: only whether they are there matters here
    echo: Any = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    def wants_prompt_logprobs(self) -> bool:
        """Whether vLLM computes log probabilities of the prompt: asked for, or echoed."""
        return self.prompt_logprobs is not None or (bool(self.echo) and self._echoes_logprobs())

    def _echoes_logprobs(self) -> bool:
        raise NotImplementedError


class _ChatBody(_Common):
    messages: Annotated[
        list[_Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    top_logprobs: Any = 0

    def _echoes_logprobs(self) -> bool:
        return self.top_logprobs is not None


class _CompletionBody(_Common):
    add_special_tokens: bool = True
    logprobs: Any = None

    def _echoes_logprobs(self) -> bool:
        return self.logprobs is not None


def _json_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise RequestInvalid("The request body is empty: send a JSON object.")
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestInvalid(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestInvalid(f"The request body must be a JSON object, not {_name(fields)}.")
    return fields


# -- prompts --------------------------------------------------------------------------------------


def _chat_prompt(body: _ChatBody) -> ChatPrompt:
    if body.add_generation_prompt and body.continue_final_message:
        raise _invalid(
            "continue_final_message", "excludes add_generation_prompt: set one of them to false"
        )
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatPrompt(
        messages=[dict(message) for message in body.messages],
        tools=body.tools or None,
        documents=body.documents,
        chat_template=body.chat_template,
        template_kwargs=template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
    )


def _completion_prompt(value: object, add_special_tokens: bool) -> TextPrompt | TokenPrompt:
    """The four forms of `prompt`. No Python loop per token id: `pack_tokens` checks them all."""
    if isinstance(value, str):
        _refuse_empty(value, "prompt")
        return TextPrompt(texts=(value,), add_special_tokens=add_special_tokens)
    if not isinstance(value, list):
        missing = "is required" if value is None else f"got {_name(value)}"
        raise _invalid(
            "prompt", f"{missing}; send a string, a list of token ids, or a list of either"
        )
    _refuse_empty(value, "prompt")
    first = value[0]
    if isinstance(first, int):
        return TokenPrompt(packed=(_packed(value, "prompt"),))
    if len(value) > PROMPTS_MAX:
        raise _invalid("prompt", f"holds {len(value)} prompts; at most {PROMPTS_MAX}")
    for index, one in enumerate(value):
        if not isinstance(one, str | list) or isinstance(one, str) != isinstance(first, str):
            raise _invalid(
                f"prompt[{index}]",
                f"got {_name(one)}; a list of prompts holds strings only, or lists of ids only",
            )
        _refuse_empty(one, f"prompt[{index}]")
    if isinstance(first, str):
        return TextPrompt(texts=tuple(value), add_special_tokens=add_special_tokens)
    return TokenPrompt(packed=tuple(_packed(one, f"prompt[{i}]") for i, one in enumerate(value)))


def _packed(token_ids: list[Any], name: str) -> bytes:
    try:
        return pack_tokens(token_ids)
    except (TypeError, OverflowError):
        raise _invalid(
            name, "holds something else than token ids (integers from 0 to 4294967295)"
        ) from None


def _refuse_empty(value: Sequence[object], name: str) -> None:
    if not value:
        raise _invalid(name, "must not be empty")


def _invalid(name: str, problem: str) -> RequestInvalid:
    return RequestInvalid(f"{name}: {problem}.", param=name)


def _parts(prompt: TextPrompt | TokenPrompt) -> tuple[str, ...] | tuple[bytes, ...]:
    return prompt.texts if isinstance(prompt, TextPrompt) else prompt.packed


def _turn(prompt: Prompt) -> int:
    if not isinstance(prompt, ChatPrompt):
        return 0
    return sum(message["role"] == "assistant" for message in prompt.messages)


# -- messages -------------------------------------------------------------------------------------


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
    return f"{path}: {expected} (got {_name(problem['input'])})"


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 1, "content", "<list>", 0)` -> `messages[1].content[0]`."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path


def _name(value: object) -> str:
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
