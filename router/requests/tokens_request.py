"""Token ids in: vLLM's generate; and the paths that turn texts into ids and back."""

from typing import Annotated, Any

from pydantic import Field

from router.requests.api_call import ApiCall, OpaquePrompt, Prompt, TokenPrompt
from router.requests.body_fields import Body, checked, invalid, json_object, kind, refuse_empty
from router.requests.long_ids import LongIds
from router.requests.prompt_forms import opaque, packed
from router.requests.received import Received


class _Sampling(Body):
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Any = None
    prompt_logprob_token_ids: Any = None
    skip_reading_prefix_cache: bool | None = None

    def reads_prefixes(self) -> bool:
        """Whether vLLM reuses resident blocks: as it is told, else without prompt logprobs."""
        if self.skip_reading_prefix_cache is not None:
            return not self.skip_reading_prefix_cache
        return self.prompt_logprobs is None and self.prompt_logprob_token_ids is None


class _GenerateBody(Body):
    sampling_params: _Sampling
    features: Any = None
    content_parts: Any = None


def parse_generate(received: Received) -> ApiCall:
    """`/inference/v1/generate`; see `received.Parse`."""
    fields = json_object(received.body)
    body = checked(_GenerateBody, fields)
    token_ids = fields.get("token_ids")
    if not isinstance(token_ids, list | LongIds):
        missing = "is required" if token_ids is None else f"got {kind(token_ids)}"
        raise invalid("token_ids", f"{missing}; send a list of token ids")
    if isinstance(token_ids, list):
        refuse_empty(token_ids, "token_ids")
    ids = packed(token_ids, "token_ids")
    prompt: Prompt = TokenPrompt(packed=(ids,))
    if body.features is not None or body.content_parts:  # media stand behind placeholders
        prompt = opaque(ids.hex())
    sampling = body.sampling_params
    return received.call(
        model=body.model or "",
        stream=bool(body.stream),
        prompt=prompt,
        prompt_field="token_ids",
        choices_count=sampling.n or 1,
        reads_prefixes=sampling.reads_prefixes(),
        cache_salt=body.cache_salt,
        output_tokens_max=sampling.max_tokens,
    )


def parse_without_prompt(received: Received) -> ApiCall:
    """`/tokenize`, `/detokenize`: work of the engine's front alone; see `received.Parse`."""
    body = checked(Body, json_object(received.body))
    return received.call(model=body.model or "", stream=False, prompt=OpaquePrompt(pieces=()))
