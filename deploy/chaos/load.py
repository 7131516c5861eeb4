"""An open load on all routers: clients as they are, who wait, chat on, or leave."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import numpy as np

from deploy.chaos.chaos_fleet import ChaosFleet, Door
from deploy.chaos.records import Outcome, RequestRecord

REQUEST_DEADLINE_S = 40.0
CONNECT_TIMEOUT_S = 2.0
READY_POLL_S = 0.25
CHATS_KEPT_MAX = 50
FOLLOW_UP_SHARE = 0.3
STREAMED_SHARE = 0.6
LONG_SHARE = 0.2
IN_FLIGHT_MAX = 1000
HTTP_OK = 200
HTTP_DRAINING = 503
WORDS = ("router", "index", "block", "prefix", "token", "cache", "lease", "slot", "engine")


@dataclass(slots=True, kw_only=True)
class Load:
    """Sends requests at a steady rate until `run` is cancelled, which then waits for their ends.

    Attributes:
        fleet: whose routers are asked; a client asks only those that say they are ready, and
            the next one when a router takes no connection or says that it drains.
        seed: of everything random.
        rate: requests a second.
        left_before_first_byte_share: clients that leave before anything came.
        left_mid_stream_share: clients that leave after the first byte.
        records: of all requests that are over.
    """

    fleet: ChaosFleet
    seed: int
    rate: float
    left_before_first_byte_share: float = 0.03
    left_mid_stream_share: float = 0.03
    records: list[RequestRecord] = field(default_factory=list)
    _ready: set[str] = field(default_factory=set)
    _requests: set[asyncio.Task[None]] = field(default_factory=set)
    _chats: list[list[dict[str, str]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    async def run(self) -> None:
        """Send until cancelled."""
        dice = np.random.default_rng(self.seed)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            watcher = tasks.create_task(self._watch())
            loop = asyncio.get_running_loop()
            due_s = loop.time()
            try:
                while True:
                    due_s += dice.exponential(1 / self.rate)
                    await asyncio.sleep(due_s - loop.time())
                    if len(self._requests) < IN_FLIGHT_MAX:
                        one = self._request(session, dice.spawn(1)[0])
                        task = tasks.create_task(one)
                        self._requests.add(task)
                        task.add_done_callback(self._requests.discard)
            except asyncio.CancelledError:
                if self._requests:
                    await asyncio.wait(self._requests)
            finally:
                watcher.cancel()

    async def _watch(self) -> None:
        """Know who is ready, as a load balancer does."""
        self._ready = {door.name for door in self.fleet.doors}

        async def look(door: Door) -> None:
            said: Any = None
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    said = await self.fleet.ready(door)
            (self._ready.discard if said is None else self._ready.add)(door.name)

        while True:
            await asyncio.gather(*(look(door) for door in tuple(self.fleet.doors)))
            await asyncio.sleep(READY_POLL_S)

    async def _request(self, session: aiohttp.ClientSession, dice: np.random.Generator) -> None:
        number = next(self._numbers)
        path, body = self._body(dice)
        call = _Call(
            session=session,
            request_id=f"chaos-{self.seed}-{number}",
            path=path,
            body=body,
            leave=self._leave(dice, streamed=body["stream"]),
            sent_s=self.fleet.now_s(),
        )
        doors = [self.fleet.doors[at] for at in dice.permutation(len(self.fleet.doors))]
        doors.sort(key=lambda door: door.name not in self._ready)
        for door in doors:
            if await call.ask(door):
                break
        self.records.append(call.record(self.fleet.now_s()))
        if call.outcome is Outcome.OK and "messages" in body and len(self._chats) < CHATS_KEPT_MAX:
            answer = {"role": "assistant", "content": "As the engine said before."}
            self._chats.append([*body["messages"], answer])

    def _body(self, dice: np.random.Generator) -> tuple[str, dict[str, Any]]:
        words = dice.integers(200, 900) if dice.random() < LONG_SHARE else dice.integers(5, 60)
        text = " ".join(
            f"{WORDS[kind % len(WORDS)]}{kind}" for kind in dice.integers(0, 900, words)
        )
        body: dict[str, Any] = {
            "model": self.fleet.local.config.model_name,
            "max_tokens": int(dice.integers(4, 61)),
            "stream": bool(dice.random() < STREAMED_SHARE),
        }
        if dice.random() < STREAMED_SHARE:
            chat: list[dict[str, str]] = []
            if self._chats and dice.random() < FOLLOW_UP_SHARE:
                chat = self._chats.pop(dice.integers(len(self._chats)))
            messages = [*chat, {"role": "user", "content": text}]
            return "/v1/chat/completions", {**body, "messages": messages}
        return "/v1/completions", {**body, "prompt": text}

    def _leave(self, dice: np.random.Generator, *, streamed: bool) -> "_Leave | None":
        roll = dice.random()
        if roll < self.left_before_first_byte_share:
            return _Leave(after_s=dice.uniform(0, 0.05), mid_stream=False)
        roll -= self.left_before_first_byte_share
        if streamed and roll < self.left_mid_stream_share:
            return _Leave(after_s=dice.uniform(0, 0.2), mid_stream=True)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leave:
    """When a client hangs up: so long after it asked, or after the first byte."""

    after_s: float
    mid_stream: bool


@dataclass(slots=True, kw_only=True)
class _Call:
    """One request of one client."""

    session: aiohttp.ClientSession
    request_id: str
    path: str
    body: dict[str, Any]
    leave: _Leave | None
    sent_s: float
    router: str | None = None
    instance_id: str | None = None
    first_byte_s: float | None = None
    outcome: Outcome = Outcome.NOWHERE
    status: int | None = None
    detail: str = ""

    async def ask(self, door: Door) -> bool:
        """Ask a router; whether that settled it."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(self.sent_s + REQUEST_DEADLINE_S) as deadline:
                if self.leave is not None and not self.leave.mid_stream:
                    deadline.reschedule(loop.time() + self.leave.after_s)
                self.router = door.name
                return await self._exchange(door, deadline)
        except TimeoutError:
            self.outcome = Outcome.LATE if self.leave is None else Outcome.LEFT
            return True
        except aiohttp.ClientConnectorError as error:
            self.router, self.detail = None, str(error)
            return False
        except (aiohttp.ClientError, OSError) as error:
            self.outcome, self.detail = Outcome.BROKEN, repr(error)
            return True

    async def _exchange(self, door: Door, deadline: asyncio.Timeout) -> bool:
        headers = {"x-request-id": self.request_id}
        async with self.session.post(
            door.url + self.path, json=self.body, headers=headers
        ) as response:
            self.status = response.status
            self.instance_id = response.headers.get("x-timestable-instance")
            if response.status != HTTP_OK:
                self.outcome = Outcome.ANSWERED_ERROR
                self.detail = (await response.text())[:200]
                reason = response.headers.get("x-timestable-reason")
                return not (response.status == HTTP_DRAINING and reason == "draining")
            now_s = asyncio.get_running_loop().time()
            self.first_byte_s = now_s
            if self.leave is not None and self.leave.mid_stream:
                deadline.reschedule(now_s + self.leave.after_s)
            answer = await response.read()
        whole = answer.rstrip().endswith(b"data: [DONE]") if self.body["stream"] else _json(answer)
        self.outcome = Outcome.OK if whole else Outcome.BROKEN
        if not whole:
            self.detail = f"the answer ends with {answer[-120:]!r}"
        return True

    def record(self, ended_s: float) -> RequestRecord:
        """What became of it."""
        return RequestRecord(
            request_id=self.request_id,
            router=self.router,
            instance_id=self.instance_id,
            streamed=self.body["stream"],
            sent_s=self.sent_s,
            first_byte_s=self.first_byte_s,
            ended_s=ended_s,
            outcome=self.outcome,
            status=self.status,
            detail=self.detail,
        )


def _json(answer: bytes) -> bool:
    try:
        return "choices" in json.loads(answer)
    except ValueError:
        return False
