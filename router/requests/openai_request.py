"""OpenAI's chat completions and text completions, as vLLM 0.32 takes them.

Only what routing needs is taken out and checked, plus the types of the common fields; everything
else is the engine's business.
"""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from router.requests.api_call import ApiCall, Prompt
from router.requests.body_fields import Body, ModelName, branch, checked, invalid, json_object
from router.requests.chat_messages import (
    Messages,
    Objects,
    chat_prompt,
    chat_tools,
    history_share,
    template_kwargs,
    turns,
)
from router.requests.prompt_forms import count, opaque, prompt_of, unless_cut
from router.requests.received import Received


class _Common(Body):
    model: ModelName
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
                branch,
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
    prompt_logprobs: Any = None  # this and the next: only whether they are there matters here
    echo: Any = None
    kv_transfer_params: Any = None

    def wants_prompt_logprobs(self) -> bool:
        """Whether vLLM computes log probabilities of the prompt: asked for, or echoed."""
        return self.prompt_logprobs is not None or (bool(self.echo) and self._echoes_logprobs())

    def _echoes_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def brings_ids(self) -> bool:
        """Whether the prompt's token ids of another engine stand beside it."""
        params = self.kv_transfer_params
        return isinstance(params, dict) and params.get("prompt_token_ids") is not None


class _ChatBody(_Common):
    messages: Messages
    tools: Objects | None = None
    documents: Objects | None = None
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
    suffix: str | None = None
    prompt_embeds: Any = None
    logprobs: Any = None

    def _echoes_logprobs(self) -> bool:
        return self.logprobs is not None


def parse_chat(received: Received) -> ApiCall:
    """`/v1/chat/completions`; see `received.Parse`."""
    body = checked(_ChatBody, json_object(received.body))
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "continue_final_message", "excludes add_generation_prompt: set one of them to false"
        )
    prompt = chat_prompt(
        body.messages,
        opaque=body.truncates_end or body.brings_ids,
        said=body.messages,
        effort=body.reasoning_effort,
        tools=chat_tools(body.tools),
        documents=body.documents,
        chat_template=body.chat_template,
        template_kwargs=template_kwargs(body.chat_template_kwargs, body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
    )
    return _call(
        received,
        body,
        prompt,
        prompt_field="messages",
        turn=turns(body.messages),
        history_share=history_share(body.messages),
    )


def parse_completion(received: Received) -> ApiCall:
    """`/v1/completions`; see `received.Parse`."""
    fields = json_object(received.body)
    body = checked(_CompletionBody, fields)
    if body.prompt_embeds is not None:
        return _call(received, body, opaque(_shown(fields.get("prompt"))))
    prompt: Prompt = prompt_of(
        fields.get("prompt"), "prompt", add_special_tokens=body.add_special_tokens
    )
    if body.suffix is not None:  # the engine puts both into a form of its own
        prompt = opaque(_shown(fields.get("prompt")), body.suffix)
    return _call(received, body, unless_cut(prompt, truncates_end=body.truncates_end))


def parse_by_content(received: Received) -> ApiCall:
    """A chat or a completion, told by whether it has `messages`; see `received.Parse`."""
    is_chat = "messages" in json_object(received.body)
    return (parse_chat if is_chat else parse_completion)(received)


def _call(received: Received, body: _Common, prompt: Prompt, **fields: Any) -> ApiCall:
    return received.call(
        model=body.model,
        stream=bool(body.stream),
        prompt=prompt,
        prompts_count=count(prompt),
        choices_count=body.n or 1,
        reads_prefixes=not body.wants_prompt_logprobs(),
        cache_salt=body.cache_salt,
        output_tokens_max=body.max_completion_tokens or body.max_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        **fields,
    )


def _shown(prompt: object) -> str:
    return prompt if isinstance(prompt, str) else repr(prompt)
