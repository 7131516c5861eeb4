"""Prompts that no instance takes are refused before they cost anything."""

from typing import Final

from router.errors import DropReason, RequestInvalid
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall, OpaquePrompt, TokenPrompt
from router.tokens.tokenize import TEXT_BYTES_PER_TOKEN_MAX, EncodedPrompt

TEXT_BYTES_ALWAYS_TAKEN: Final = 1 << 20
"""Bodies up to here are tokenized and counted; beside the prompt they may hold images and tools."""


def refuse_huge(served: ServedModel, call: ApiCall) -> None:
    """Before a text occupies a thread for longer than anybody waits.

    Raises:
        RequestInvalid: its body cannot be a prompt that the model takes.
    """
    limit = served.max_model_len_tokens
    costs_little = isinstance(call.prompt, TokenPrompt | OpaquePrompt)
    if limit is None or costs_little or call.truncate_prompt_tokens or generates_nothing(call):
        return
    bytes_max = limit * TEXT_BYTES_PER_TOKEN_MAX * call.prompts_count
    if len(call.body) > max(bytes_max, TEXT_BYTES_ALWAYS_TAKEN):
        raise RequestInvalid(
            f"The request has {len(call.body)} bytes, which cannot be the {limit} tokens that "
            f"`{served.name}` takes at most. Shorten the prompt.",
            param=call.prompt_field,
            reason=DropReason.PROMPT_TOO_LONG,
        )


def generates_nothing(call: ApiCall) -> bool:
    """Such a prompt needs no room for an answer, and pooling models may take it in pieces."""
    return call.output_tokens_max == 0


def refuse_too_long(prompt: EncodedPrompt, served: ServedModel, call: ApiCall) -> None:
    """Before an instance is asked that would refuse it.

    Raises:
        RequestInvalid: the prompt leaves no room for an answer.
    """
    limit = served.max_model_len_tokens
    if generates_nothing(call) or call.truncate_prompt_tokens:  # the engine makes it fit
        return
    if limit is not None and prompt.longest_tokens + 1 > limit:
        raise RequestInvalid(
            f"The prompt has {prompt.longest_tokens} tokens, and `{served.name}` takes at most "
            f"{limit} with at least one of them for the answer. Shorten the prompt.",
            param=call.prompt_field,
            reason=DropReason.PROMPT_TOO_LONG,
        )
