"""The two completion endpoints: parse, check, tokenize, run, answer."""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import xxhash
from aiohttp import HttpVersion11, web

from workers.simulated.answer import Answer, AnswerHead, dump_json, find_stop
from workers.simulated.category import category_of
from workers.simulated.errors import (
    ApiError,
    bad_request,
    kv_load_failed,
    overloaded,
    unknown_model,
)
from workers.simulated.eviction.base import Category
from workers.simulated.kv_transfer import (
    FIELD,
    NO_TRANSFER,
    KvKeeper,
    Source,
    Transfer,
    TransferFailedError,
    parse_transfer,
)
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

logger = logging.getLogger(__name__)


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
        self,
        *,
        models: ServedModels,
        text_model: TextModel,
        runtime: EngineRuntime,
        keeper: KvKeeper | None = None,
    ) -> None:
        self._keeper = keeper
        self._models = models
        self._text = text_model
        self._runtime = runtime
        self.in_flight_count = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = Body(await request.read())
        async with self._letting_go(body):
            call = parse_generation(body, chat=True)
            self._check_model(call.model)
            packed = pack_tokens(await self.chat_token_ids(body, call))
            return await self._generate(request, body, call, [packed], chat=True)

    async def text(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = Body(await request.read())
        async with self._letting_go(body):
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
            return await self._generate(request, body, call, packed, chat=False)

    @contextlib.asynccontextmanager
    async def _letting_go(self, body: Body) -> AsyncIterator[None]:
        """Whoever holds blocks for a request that is refused here is told, as vLLM does."""
        try:
            yield
        except ApiError:
            if self._keeper is not None and isinstance(body.fields.get(FIELD), dict):
                source = parse_transfer(body).source
                if source is not None:
                    await self._keeper.reject(source)
            raise

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
        self, http: web.Request, body: Body, call: Generation, prompts: list[bytes], *, chat: bool
    ) -> web.StreamResponse:
        transfer = parse_transfer(body) if self._keeper is not None else NO_TRANSFER
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
        category = category_of(http.headers, body)
        for packed in prompts:
            self._add_choices(answer, packed, session_id, category, keeps_blocks=transfer.keep)
        try:
            self._runtime.check_room(len(answer.choices))
        except QueueFullError as error:
            raise overloaded(str(error)) from error
        self.in_flight_count += 1
        try:
            if isinstance(answer, StreamedAnswer):
                return await self._stream(http, answer, transfer)
            await self._submit(answer, transfer)
            await answer.done
            self._keep(http, answer)
            return web.Response(body=dump_json(answer.body()), content_type="application/json")
        finally:
            # Also on cancellation, which is what a client's disconnect is.
            self.in_flight_count -= 1
            for choice in answer.choices:
                self._runtime.abort(choice.request.request_id)
                if transfer.keep and answer.transfer_params is None:
                    self._runtime.engine.release_kept(choice.request.request_id)

    def _keep(self, http: web.Request, answer: Answer) -> None:
        """Hold the blocks of an only choice."""
        request = answer.choices[0].request
        block_ids = self._runtime.engine.kept_blocks(request.request_id)
        if self._keeper is not None and block_ids and len(answer.choices) == 1:
            answer.transfer_params = self._keeper.keep(
                request.request_id, block_ids, request.prompt_tokens, http
            )

    async def _stream(
        self, http: web.Request, answer: StreamedAnswer, transfer: Transfer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(http)
        answer.start(http.transport, chunked=http.version >= HttpVersion11)
        try:
            await self._submit(answer, transfer)
        except ApiError as error:  # too late for its status
            answer.fail(error.body())
        await answer.done
        with contextlib.suppress(ConnectionError):  # the client left with the last token
            await response.write_eof()
        return response

    async def _submit(self, answer: Answer, transfer: Transfer) -> None:
        """Queue the choices, once what another engine has computed for them is here.

        Raises:
            ApiError: it could not be had.
        """
        arrived_s = time.monotonic()
        if transfer.source is not None and self._keeper is not None:
            await self._take(answer, transfer.source, self._keeper)
        for choice in answer.choices:
            self._runtime.submit(choice.request, choice, arrived_s)

    async def _take(self, answer: Answer, source: Source, keeper: KvKeeper) -> None:
        request = answer.choices[0].request
        here_tokens = self._runtime.engine.device_hit_tokens(request)
        try:
            await keeper.take(source, request.prompt_tokens - 1 - here_tokens)
        except TransferFailedError as error:
            logger.warning("KV$ of request %s cannot be had: %s", request.request_id, error)
            if not keeper.options.recompute:
                self._runtime.metrics.finished_counts["error"] += len(answer.choices)
                raise kv_load_failed() from error
            return
        for choice in answer.choices:
            choice.request = replace(choice.request, received=True)

    def _add_choices(
        self,
        answer: Answer,
        packed: bytes,
        session_id: str | None,
        category: Category | None,
        *,
        keeps_blocks: bool,
    ) -> None:
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
                keeps_blocks=keeps_blocks,
                category=category,
            )
            answer.add_choice(request, stop)
