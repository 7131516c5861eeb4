"""The two completion endpoints: parse, check, tokenize, run, answer."""

import contextlib
import time
import uuid
from dataclasses import dataclass

import xxhash
from aiohttp import HttpVersion11, web

from workers.simulated.answer import Answer, AnswerHead, dump_json, find_stop
from workers.simulated.errors import bad_request, overloaded, unknown_model
from workers.simulated.protocol import (
    CHOICES_MAX,
    Body,
    Generation,
    parse_generation,
    parse_messages,
    parse_prompts,
)
from workers.simulated.request import TOKEN_BYTES, Request, pack_tokens
from workers.simulated.runtime import EngineRuntime, QueueFullError
from workers.simulated.stream import StreamedAnswer
from workers.simulated.text import TextError, TextModel

SEED_MASK = (1 << 64) - 1
STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """Names under which the engine serves.

    Attributes:
        model_name: the base model.
        adapter_names: LoRA adapters, numbered from 1 in this order.
        max_model_len_tokens: prompt and answer together.
        default_max_tokens: answer length of a chat call that names none, at most.
    """

    model_name: str
    adapter_names: tuple[str, ...]
    max_model_len_tokens: int
    default_max_tokens: int


class CompletionsApi:
    """Handlers of /v1/chat/completions and /v1/completions."""

    def __init__(
        self, *, models: ServedModels, text_model: TextModel, runtime: EngineRuntime
    ) -> None:
        self._models = models
        self._text = text_model
        self._runtime = runtime
        self.in_flight_count = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = Body(await request.read())
        call = parse_generation(body, chat=True)
        self._check_model(call.model)
        packed = pack_tokens(await self.chat_token_ids(body, call))
        return await self._generate(request, call, [packed], chat=True)

    async def text(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = Body(await request.read())
        call = parse_generation(body, chat=False)
        self._check_model(call.model)
        prompts = parse_prompts(body, vocabulary_size=self._text.vocabulary_size)
        if len(prompts) * call.choice_count > CHOICES_MAX:
            raise bad_request(f"prompts times n must be at most {CHOICES_MAX}.", "n")
        packed = []
        for prompt in prompts:
            if isinstance(prompt, str):
                packed.append(pack_tokens(await self.text_token_ids(prompt, call)))
            else:
                packed.append(prompt)
        return await self._generate(request, call, packed, chat=False)

    async def chat_token_ids(self, body: Body, call: Generation) -> list[int]:
        """Token ids of a chat call's `messages` after the chat template."""
        chat = parse_messages(body)
        try:
            rendered = self._text.render_chat(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                template_arguments=chat.template_arguments,
            )
            return await self._text.encode(rendered, add_special_tokens=call.add_special_tokens)
        except TextError as error:
            raise bad_request(str(error), "messages") from error

    async def text_token_ids(self, text: str, call: Generation) -> list[int]:
        """Token ids of a plain prompt."""
        try:
            return await self._text.encode(text, add_special_tokens=call.add_special_tokens)
        except TextError as error:
            raise bad_request(str(error), "prompt") from error

    def _check_model(self, name: str | None) -> None:
        models = self._models
        if name is not None and name != models.model_name and name not in models.adapter_names:
            raise unknown_model(name)

    def _output_tokens(self, call: Generation, prompt_tokens: int) -> int:
        """Length of the answer; an error when prompt and answer exceed the context."""
        context = self._models.max_model_len_tokens
        wanted = call.max_tokens
        if wanted is None:
            wanted = max(1, min(self._models.default_max_tokens, context - prompt_tokens))
        if prompt_tokens + wanted > context:
            message = (
                f"You passed {prompt_tokens} input tokens and requested {wanted} output tokens. "
                f"However, the model's context length is only {context} tokens, resulting in a "
                f"maximum input length of {max(0, context - wanted)} tokens. Please reduce the "
                f"length of the input prompt. (parameter=input_tokens, value={prompt_tokens})"
            )
            raise bad_request(message, "input_tokens")
        return wanted

    async def _generate(
        self, http: web.Request, call: Generation, prompts: list[bytes], *, chat: bool
    ) -> web.StreamResponse:
        base_id = http.headers.get("X-Request-Id") or call.request_id or uuid.uuid4().hex
        head = AnswerHead(
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{base_id}",
            created_s=int(time.time()),
            model=call.model or self._models.model_name,
            chat=chat,
        )
        session_id = call.session_id or http.headers.get("X-Session-Id")
        make_answer = StreamedAnswer if call.stream else Answer
        answer = make_answer(head=head, call=call, text_model=self._text)
        for packed in prompts:
            self._add_choices(answer, packed, session_id)
        try:
            self._runtime.check_room(len(answer.choices))
        except QueueFullError as error:
            raise overloaded(str(error)) from error
        self.in_flight_count += 1
        try:
            if isinstance(answer, StreamedAnswer):
                return await self._stream(http, answer)
            self._submit(answer)
            await answer.done
            return web.Response(body=dump_json(answer.body()), content_type="application/json")
        finally:
            # Also on cancellation, which is what a client's disconnect is.
            self.in_flight_count -= 1
            for choice in answer.choices:
                self._runtime.abort(choice.request.request_id)

    async def _stream(self, http: web.Request, answer: StreamedAnswer) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(http)
        answer.start(http.transport, chunked=http.version >= HttpVersion11)
        self._submit(answer)
        await answer.done
        with contextlib.suppress(ConnectionError):  # the client left with the last token
            await response.write_eof()
        return response

    def _submit(self, answer: Answer) -> None:
        for choice in answer.choices:
            self._runtime.submit(choice.request, choice)

    def _add_choices(self, answer: Answer, packed: bytes, session_id: str | None) -> None:
        """One choice for each of `n`, all of the same prompt."""
        call, adapters = answer.call, self._models.adapter_names
        prompt_tokens = len(packed) // TOKEN_BYTES
        if not prompt_tokens:
            raise bad_request("The prompt is empty after tokenization.", "prompt")
        output_tokens = self._output_tokens(call, prompt_tokens)
        adapter = call.model if call.model in adapters else None
        first_seed = xxhash.xxh3_64_intdigest(packed) if call.seed is None else call.seed
        for number in range(call.choice_count):
            seed = (first_seed + number) & SEED_MASK
            stop = find_stop(self._text, call, seed=seed, output_tokens=output_tokens)
            request = Request(
                request_id=uuid.uuid4().hex,
                packed_prompt=packed,
                output_tokens=stop.output_tokens if stop else output_tokens,
                seed=seed,
                adapter=adapter,
                adapter_id=adapters.index(adapter) + 1 if adapter else None,
                salt=call.salt,
                session_id=session_id,
            )
            answer.add_choice(request, stop)
