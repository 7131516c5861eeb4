"""Load for proxy_bench.py: prompts, and streams that are read by a bare asyncio protocol."""

import asyncio
import gc
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import numpy as np

MESSAGE_WORDS = 500
VOCABULARY = Path(__file__).parents[2] / "workers" / "simulated" / "tokenizer" / "tokenizer.json"
DEADLINE_S = 60.0
"""Of a run that takes 4 s and of opening streams; what has not come by then is an error."""

OPEN_PER_S = 400
"""Streams that are opened beforehand come no faster."""

DIRECT_SHARE = 16
"""One direct stream runs beside so many proxied ones, for the same machine at the same time."""

FIRST_EVENT = b"data: "
LAST_EVENT = b"data: [DONE]"
END_OF_BODY = b"\r\n0\r\n\r\n"


# -- prompts --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation whose every turn is a request.

    Attributes:
        name: begins its prompt, so that no two chats share a block.
        messages: of the last turn; the first has `first_count` of them, each next one two more.
        first_count: messages of the first turn.
    """

    name: str
    messages: list[dict[str, str]]
    first_count: int

    def turn(self, number: int) -> list[dict[str, str]]:
        """Messages of a turn, from 0; each turn has a name of its own."""
        messages = self.messages[: self.first_count + 2 * number]
        return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']} {number}"}]

    def body(self, number: int, events: int) -> bytes:
        """The request of a turn, for a streamed answer of so many events."""
        fields = {
            "model": "sim",
            "messages": self.turn(number),
            "stream": True,
            "temperature": 0.7,
            "max_tokens": events,
        }
        return json.dumps(fields).encode()


def _words() -> list[str]:
    """Words that are a token each, with the space in front."""
    vocabulary = json.loads(VOCABULARY.read_text())["model"]["vocab"]
    return sorted(one[1:] for one in vocabulary if re.fullmatch("\u0120[a-z]{3,}", one))


def chats(count: int, *, prompt_tokens: int, turns: int, seed: int) -> list[Chat]:
    """Conversations of random words; their first turn has about so many tokens."""
    rng = np.random.default_rng(seed)
    words = np.array(_words())

    def text(words_count: int) -> str:
        return " ".join(words[rng.integers(0, len(words), max(words_count, 1))])

    made = []
    for index in range(count):
        name = f"chat-{seed:x}-{index}-0"
        left = prompt_tokens
        messages = [{"role": "system", "content": f"{name} {text(min(left, 40))}"}]
        left -= 40
        while left > 0 or len(messages) % 2:
            role = "user" if len(messages) % 2 else "assistant"
            messages.append({"role": role, "content": text(min(left, MESSAGE_WORDS))})
            left -= MESSAGE_WORDS
        first_count = len(messages)
        for _ in range(turns - 1):
            messages.append({"role": "assistant", "content": text(50)})
            messages.append({"role": "user", "content": text(30)})
        made.append(Chat(name=name, messages=messages, first_count=first_count))
    return made


# -- streams --------------------------------------------------------------------------------------


@dataclass
class Samples:
    """What came of a run.

    Attributes:
        first_s: seconds from request to first event, one an answer.
        events: received so far.
        errors: answers that were none, or were incomplete.
        problem: last bytes of the last of these.
    """

    first_s: list[float] = field(default_factory=list)
    events: int = 0
    errors: int = 0
    problem: bytes = b""

    def quantile_s(self, q: float) -> float:
        """Of the time to the first event."""
        return float(np.quantile(self.first_s, q)) if self.first_s else float("nan")


class Stream(asyncio.Protocol):
    """One kept-alive connection; `ask` sends a request and returns when the answer has ended."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self._sent_s = 0.0
        self._first = False
        self._tail = b""
        self._events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        for waited in (self._opened, self._ended):
            _set(waited)

    def data_received(self, data: bytes) -> None:
        events = data.count(FIRST_EVENT)
        if events and not self._first:
            self._first = True
            self._samples.first_s.append(time.perf_counter() - self._sent_s)
            _set(self._opened)
        self._events += events
        self._samples.events += events
        tail = self._tail + data[-64:]
        self._tail = tail[-64:]
        # Proxies that re-frame answers may put the end into any piece, so the tail is looked at.
        whole = tail.endswith(END_OF_BODY) or (
            not self._first and b"content-length" in data.lower()
        )
        if whole:
            _set(self._opened)
            _set(self._ended)

    async def open(self, url: str, head: bytes, body: bytes) -> None:
        """Send a request and return at its first event; connects where there is no connection."""
        if self._transport is None:
            at = urlsplit(url)
            await asyncio.get_running_loop().create_connection(lambda: self, at.hostname, at.port)
        assert self._transport is not None
        self._first, self._tail, self._events = False, b"", 0
        self._opened = asyncio.get_running_loop().create_future()
        self._ended = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(head % len(body) + body)
        await self._opened
        if not self._first:
            self._fail()

    async def ask(self, url: str, head: bytes, body: bytes, events: int) -> None:
        """One request and its whole answer."""
        await self.open(url, head, body)
        assert self._ended is not None
        await self._ended
        if self._first and self._events < events:
            self._fail()

    def _fail(self) -> None:
        self._samples.errors += 1
        self._samples.problem = self._tail
        self.close()

    def close(self) -> None:
        """End the connection, whatever is in flight."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


def _set(waited: asyncio.Future[None] | None) -> None:
    if waited is not None and not waited.done():
        waited.set_result(None)


def _head(url: str) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        "User-Agent: OpenAI/Python 2.9.0\r\nAccept: application/json\r\n"
        "Authorization: Bearer sk-none\r\nContent-Type: application/json\r\n"
        "Content-Length: %d\r\n\r\n"
    ).encode()


@asynccontextmanager
async def opened(url: str, bodies: Sequence[bytes]) -> AsyncIterator[Samples]:
    """Streams that are open meanwhile, one for each body; what they receive is counted live.

    Those that have no first event within DEADLINE_S are errors.
    """
    samples = Samples()
    streams = [Stream(samples) for _ in bodies]

    async def start(number: int, stream: Stream, body: bytes) -> None:
        await asyncio.sleep(number / OPEN_PER_S)
        await stream.open(url, _head(url), body)

    try:
        try:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                for number, (stream, body) in enumerate(zip(streams, bodies, strict=True)):
                    tasks.create_task(start(number, stream, body))
        except TimeoutError:
            samples.errors = len(bodies) - len(samples.first_s)
        yield samples
    finally:
        for stream in streams:
            stream.close()


async def play(
    url: str,
    direct: Sequence[str],
    bodies: Sequence[bytes],
    *,
    streams: int,
    events: int,
    length_s: float,
) -> tuple[Samples, Samples]:
    """Send all bodies through a proxy in so many streams, and some to the engines directly.

    Args:
        url: of the proxy.
        direct: of the engines.
        bodies: each is sent once through the proxy.
        streams: at a time; their starts are spread over `length_s`.
        events: of each answer.
        length_s: of an answer.

    Returns:
        Through the proxy, directly. What has not come within DEADLINE_S is an error.
    """
    proxied, straight = Samples(), Samples()
    left = iter(bodies)
    gc.collect()
    gc.disable()
    try:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(_worker(straight, one, _forever(bodies), events, delay_s))
                for one, delay_s in _starts(direct, -(-streams // DIRECT_SHARE), length_s)
            ]
            running = [
                tasks.create_task(_worker(proxied, one, left, events, delay_s))
                for one, delay_s in _starts([url], streams, length_s)
            ]
            await asyncio.wait(running)
            for task in beside:
                task.cancel()
    except TimeoutError:
        proxied.errors = max(proxied.errors, len(bodies) - len(proxied.first_s))
    finally:
        gc.enable()
    return proxied, straight


async def _worker(
    samples: Samples, url: str, bodies: Iterator[bytes], events: int, delay_s: float
) -> None:
    await asyncio.sleep(delay_s)
    stream, head = Stream(samples), _head(url)
    try:
        for body in bodies:
            await stream.ask(url, head, body, events)
    finally:
        stream.close()


def _starts(urls: Sequence[str], count: int, length_s: float) -> list[tuple[str, float]]:
    return [(urls[i % len(urls)], (i + 0.5) * length_s / count) for i in range(count)]


def _forever(bodies: Sequence[bytes]) -> Iterator[bytes]:
    while True:
        yield from bodies
