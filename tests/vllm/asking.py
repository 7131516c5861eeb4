"""A client that asks the routers in turn and notes what was predicted and what was true."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from deploy.demo.audit import ServedRequest
from tests.vllm.prompts import Prompts
from tests.vllm.settings import ADAPTERS, NAME

DEADLINE_S = 60.0
"""Of one request, queueing on two busy cores included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request and its answer. Times are wall clock.

    Attributes:
        sent_s: when it was sent.
        adapter: LoRA adapter, None for the base model.
        salt: its cache salt.
        degraded: decided without the index or the ledger.
        error: None, or what went wrong.
        instance_id: who answered; None without an answer.
        served: what an audit needs; None without a whole answer.
        prompt_ids: as the engine read them.
        output_ids: token ids of the answer.
        text: of the answer.
    """

    sent_s: float
    adapter: str | None
    salt: str | None
    degraded: bool = False
    error: str | None = None
    instance_id: str | None = None
    served: ServedRequest | None = None
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    text: str = ""

    @property
    def predicted_tokens(self) -> int:
        """Hit tokens of the decision."""
        assert self.served is not None, self.error
        return self.served.predicted_tokens

    @property
    def actual_tokens(self) -> int:
        """Cached tokens of the engine's usage."""
        assert self.served is not None, self.error
        return self.served.actual_tokens


@dataclass(slots=True, kw_only=True)
class Asker:
    """Sends requests through the routers alternately; every second one as a stream.

    Attributes:
        session: for all requests.
        router_urls: whom to ask in turn.
        asked: everything, in the order of the answers.
    """

    session: aiohttp.ClientSession
    router_urls: Sequence[str]
    asked: list[Asked] = field(default_factory=list)
    _turns: "itertools.count[int]" = field(default_factory=itertools.count)

    async def complete(self, prompt: Sequence[int] | str, **options: Any) -> Asked:
        """Ask /v1/completions; options are the body's, `model` among them."""
        return await self._ask("/v1/completions", {"prompt": prompt} | options)

    async def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Asked:
        """Ask /v1/chat/completions."""
        return await self._ask("/v1/chat/completions", {"messages": messages} | options)

    async def _ask(self, path: str, options: Mapping[str, Any]) -> Asked:
        turn = next(self._turns)
        stream = turn // len(self.router_urls) % 2 == 1
        body: dict[str, Any] = {
            "model": NAME,
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= options
        url = self.router_urls[turn % len(self.router_urls)] + path
        asked = await self._send(url, body)
        self.asked.append(asked)
        return asked

    async def _send(self, url: str, body: Mapping[str, Any]) -> Asked:
        sent_s = time.time()
        model, salt = body["model"], body.get("cache_salt")
        adapter = model if model in ADAPTERS else None
        headers = {"x-timestable-explain": "1"}
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                self.session.post(url, json=body, headers=headers) as response,
            ):
                if response.status != 200:
                    text = (await response.text())[:300]
                    error = f"{response.status}: {text}"
                    return Asked(sent_s=sent_s, adapter=adapter, salt=salt, error=error)
                decision = json.loads(response.headers["x-timestable-decision"])
                answer = _Answer()
                async for part in _parts(response):
                    answer.take(part)
        except (aiohttp.ClientError, OSError, TimeoutError) as failure:
            return Asked(sent_s=sent_s, adapter=adapter, salt=salt, error=repr(failure))
        if answer.error is not None or answer.cached_tokens is None:
            error = answer.error or "the answer has no cached tokens"
            return Asked(sent_s=sent_s, adapter=adapter, salt=salt, error=error)
        served = ServedRequest(
            request_id=response.headers["x-request-id"],
            instance_id=decision["instance"],
            decided_s=decision["decided_s"],
            first_token_s=answer.first_token_s,
            prompt=tuple(answer.prompt_ids),
            predicted_tokens=decision["hit_tokens"],
            actual_tokens=answer.cached_tokens,
            in_flight_tokens=decision["in_flight_tokens"],
        )
        return Asked(
            sent_s=sent_s,
            adapter=adapter,
            salt=salt,
            degraded=decision["degraded"],
            instance_id=decision["instance"],
            served=served,
            prompt_ids=tuple(answer.prompt_ids),
            output_ids=tuple(answer.output_ids),
            text=answer.text,
        )


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The whole answer, or the events of a stream."""
    if response.content_type != "text/event-stream":
        yield await response.json()
        return
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if data and data != b"[DONE]":
            yield json.loads(data)


class _Answer:
    """Gathers an answer, whole or in pieces."""

    def __init__(self) -> None:
        self.prompt_ids: list[int] = []
        self.output_ids: list[int] = []
        self.text = ""
        self.cached_tokens: int | None = None
        self.first_token_s = 0.0
        self.error: str | None = None

    def take(self, part: Mapping[str, Any]) -> None:
        """Read one piece."""
        if "error" in part:
            self.error = str(part["error"])
        self.prompt_ids += part.get("prompt_token_ids") or ()  # of a chat it stands outside
        for choice in part.get("choices", ()):
            self.prompt_ids += choice.get("prompt_token_ids") or ()
            self.output_ids += choice.get("token_ids") or ()
            said = choice.get("message") or choice.get("delta") or choice
            self.text += said.get("content", said.get("text")) or ""
            if not self.first_token_s and (choice.get("token_ids") or self.text):
                self.first_token_s = time.time()
        usage = part.get("usage")
        if usage:
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def at_once(
    jobs: Iterable[Callable[[], Coroutine[Any, Any, Any]]], concurrency: int
) -> list[Any]:
    """Run jobs, so many at a time, in order; their results in order."""
    limit = asyncio.Semaphore(concurrency)

    async def run(job: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async with limit:
            return await job()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(job)) for job in jobs]
    return [task.result() for task in running]


async def traffic(asker: Asker, prompts: Prompts, stems: list[list[int]], rounds: int) -> None:
    """Ordinary requests that share the stems."""
    for _ in range(rounds):
        for stem in stems:
            await asker.complete([*stem, *prompts.ids(9)])
