"""Whether engines make the same token ids of a text as this router; if not, its hits are wrong.

Each instance is asked once, by `POST /tokenize` as vLLM has it, for a plain text and for a chat. An
engine that was started with another chat template, or with a tokenizer that is not the one loaded
here, is so found before anybody wonders about missing hits. Nobody is refused because of it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

import aiohttp
import structlog

from indexer.contract.block_hash import pack_tokens
from indexer.contract.identifiers import InstanceId
from indexer.contract.records import InstanceRecord
from router import telemetry
from router.errors import DegradedCause, TokensUnknown
from router.index.known_fleets import ServedModel
from router.requests.api_call import ChatPrompt, TextPrompt

log = structlog.get_logger()

LOOK_EVERY_S: Final = 1.0
ASK_TIMEOUT_S: Final = 5.0
ASK_AGAIN_S: Final = 10.0
ASKED_MAX: Final = 3
"""Times that an engine which does not answer is asked; not every engine has the path."""

ANSWER_BYTES_MAX: Final = 256 * 1024

TEXT: Final = (
    "Hello, world!  Tokens: 12345, na\u00efve \u00e9t\u00e9, \u4f60\u597d.\n\tdef f(x): return x"
)
CHAT: Final = (
    {"role": "user", "content": "Which of these is larger, 9.11 or 9.9?"},
    {"role": "assistant", "content": "9.9 is larger."},
    {"role": "user", "content": "Are you sure?\n\nThink again. "},
)

Ids = Callable[[ServedModel, ChatPrompt | TextPrompt], Awaitable[bytes]]
"""Packed token ids; raises TokensUnknown."""


class Verdict(StrEnum):
    """What an engine's token ids say about this router's."""

    AGREES = "agrees"
    TOKENIZER_DIFFERS = "tokenizer-differs"
    TEMPLATE_DIFFERS = "template-differs"
    UNANSWERED = "unanswered"


_REMEDIES: Final = {
    Verdict.TOKENIZER_DIFFERS: "give the engine's own tokenizer with --tokenizers MODEL=FOLDER",
    Verdict.TEMPLATE_DIFFERS: "the engine has another chat template (--chat-template?): give "
    "--tokenizers MODEL=FOLDER, a folder with the tokenizer and that template as "
    "chat_template.jinja",
}


@dataclass(slots=True)
class _Asked:
    """An instance, and what it said."""

    scope: str
    verdict: Verdict = Verdict.UNANSWERED
    times: int = 0
    next_s: float = 0.0


class Agreement:
    """Asks each instance of each model whose tokenizer is loaded.

    Args:
        ids: this router's.
        open_session: to engines; takes what aiohttp's does.
    """

    def __init__(
        self, ids: Ids, open_session: Callable[..., aiohttp.ClientSession] = aiohttp.ClientSession
    ) -> None:
        self._ids = ids
        self._open_session = open_session
        self._asked: dict[InstanceId, _Asked] = {}
        self._scopes: set[str] = set()

    async def run(
        self,
        models: Callable[[], Mapping[str, ServedModel]],
        loaded: Callable[[ServedModel], bool],
    ) -> None:
        """Ask whoever has not been asked, one after the other, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        async with self._open_session(timeout=timeout) as session:
            while True:
                known = [served for served in models().values() if served.adapter is None]
                self._forget(known)
                for served in known:
                    if loaded(served):
                        for instance in served.instances:
                            await self._ask_if_due(session, served, instance)
                await asyncio.sleep(LOOK_EVERY_S)

    def annotate(self, fleet_view: dict[str, Any]) -> None:
        """Add `tokenizer_agrees` to each instance: True, False, None when it did not say."""
        for instance in fleet_view["instances"]:
            asked = self._asked.get(instance["instance_id"])
            verdict = Verdict.UNANSWERED if asked is None else asked.verdict
            unknown = verdict is Verdict.UNANSWERED
            instance["tokenizer_agrees"] = None if unknown else verdict is Verdict.AGREES

    def _forget(self, known: list[ServedModel]) -> None:
        """Those who have left."""
        present = {one.instance_id for served in known for one in served.instances}
        for instance_id in self._asked.keys() - present:
            del self._asked[instance_id]
        self._tell()

    def _tell(self) -> None:
        agrees: dict[str, bool] = {}
        for asked in self._asked.values():
            if asked.verdict is not Verdict.UNANSWERED:
                so_far = agrees.get(asked.scope, True)
                agrees[asked.scope] = so_far and asked.verdict is Verdict.AGREES
        for scope, value in agrees.items():
            telemetry.TOKENIZER_AGREES.labels(scope).set(value)
        for scope in self._scopes - agrees.keys():
            telemetry.TOKENIZER_AGREES.remove(scope)
        self._scopes = set(agrees)

    async def _ask_if_due(
        self, session: aiohttp.ClientSession, served: ServedModel, instance: InstanceRecord
    ) -> None:
        scope = served.fleet.model_scope
        asked = self._asked.setdefault(instance.instance_id, _Asked(scope))
        if asked.verdict is not Verdict.UNANSWERED or asked.times >= ASKED_MAX:
            return
        if time.monotonic() < asked.next_s:
            return
        asked.times += 1
        asked.verdict = await self._verdict(session, served, instance)
        asked.next_s = time.monotonic() + ASK_AGAIN_S
        telemetry.TOKENIZER_ASKED.labels(asked.verdict).inc()
        self._tell()
        if remedy := _REMEDIES.get(asked.verdict):
            log.warning(
                "tokenizer_differs",
                model=scope,
                instance_id=instance.instance_id,
                problem=asked.verdict,
                effect="its prompts are served, with wrong or no prefix hits",
                remedy=remedy,
            )

    async def _verdict(
        self, session: aiohttp.ClientSession, served: ServedModel, instance: InstanceRecord
    ) -> Verdict:
        text = await _engine_ids(session, served, instance, {"prompt": TEXT})
        if text is None:
            return Verdict.UNANSWERED
        try:
            if text != await self._ids(served, TextPrompt(texts=(TEXT,))):
                return Verdict.TOKENIZER_DIFFERS
            chat = await _engine_ids(session, served, instance, {"messages": list(CHAT)})
            if chat is None:  # it takes no chats
                return Verdict.AGREES
            mine = await self._ids(served, ChatPrompt(messages=[dict(one) for one in CHAT]))
        except TokensUnknown as error:
            failed = error.cause is DegradedCause.TEMPLATE_FAILED
            return Verdict.TEMPLATE_DIFFERS if failed else Verdict.UNANSWERED
        return Verdict.AGREES if chat == mine else Verdict.TEMPLATE_DIFFERS


async def _engine_ids(
    session: aiohttp.ClientSession,
    served: ServedModel,
    instance: InstanceRecord,
    what: Mapping[str, object],
) -> bytes | None:
    """Packed token ids, None where they are not to be had."""
    url = instance.url.rstrip("/") + "/tokenize"
    try:
        async with session.post(
            url, json={"model": served.name} | dict(what), allow_redirects=False
        ) as answer:
            if answer.status != HTTPStatus.OK:
                return None
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > ANSWER_BYTES_MAX:
                    return None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    try:
        return pack_tokens(json.loads(body)["tokens"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
