"""What the engine tells over HTTP: who it is, where its events are, how busy it is.

Only /health and /v1/models are demanded. Engines of another make have no /kv_event_sources and
other metrics or none: what they do not tell is absent here, and `plan.py` asks the operator for it.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import aiohttp

from indexer.engine.engine_metrics import (
    CACHE_CONFIG,
    CacheConfig,
    EngineSample,
    parse_cache_configs,
    parse_samples,
)
from indexer.engine.event_source import EventSource, parse_sources
from indexer.errors import EngineUnreachable, EngineUnsuitable

DEADLINE_S: Final = 2.0
"""One HTTP answer of the engine; its API process may be busy with a large request."""

PROBE_DEADLINE_S: Final = 30.0
"""One short completion of an engine that has nothing else to do, on a slow device."""

ANSWER_BYTES_MAX: Final = 16 << 20

ABSENT: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
"""Answers of an engine that does not know a path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """One engine process.

    Attributes:
        models: served names, primary first.
        model_root: where weights and tokenizer come from.
        adapters: LoRA adapter names.
        max_model_len_tokens: longest request.
        sources: event sockets by rank; None when the engine has no way to tell.
        caches: cache shapes by `engine` label; empty when the engine has no such metric.
        version: vLLM's version; None when it tells none.
    """

    models: tuple[str, ...]
    model_root: str
    adapters: tuple[str, ...]
    max_model_len_tokens: int | None
    sources: tuple[EventSource, ...] | None
    caches: Mapping[str, CacheConfig]
    version: str | None


class EngineApi:
    """HTTP client of one engine; a call without a usable answer raises EngineUnreachable."""

    def __init__(self, url: str, *, api_key: str | None, tls: ssl.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self.host = urlsplit(self.url).hostname or ""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
            connector=aiohttp.TCPConnector(limit=4, keepalive_timeout=3.0, ssl=tls or True),
            raise_for_status=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def is_healthy(self) -> bool:
        """Whether the engine says that it works."""
        status, _ = await self._get("/health")
        return status == HTTPStatus.OK

    async def samples(self) -> dict[str, EngineSample]:
        """Load by `engine` label; empty when the engine has no metrics of vLLM's names."""
        text = await self._metrics()
        try:
            return parse_samples(text)
        except (ValueError, IndexError) as error:
            raise EngineUnreachable(f"{self.url}/metrics is unreadable: {error!r}") from error

    async def models(self) -> tuple[Mapping[str, Any], ...]:
        """Entries of GET /v1/models."""
        status, body = await self._get("/v1/models")
        if status in (401, 403):
            raise EngineUnsuitable(
                f"{self.url}/v1/models answered {status}: give its key with --engine_api_key"
            )
        answer = self._json("/v1/models", status, body)
        entries = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in entries
        ):
            raise EngineUnreachable(f"{self.url}/v1/models answered no list of models")
        return tuple(entries)

    async def complete(self, body: Mapping[str, Any]) -> None:
        """A completion whose answer does not matter, within PROBE_DEADLINE_S."""
        path = "/v1/completions"
        timeout = aiohttp.ClientTimeout(total=PROBE_DEADLINE_S)
        try:
            async with self._session.post(self.url + path, json=body, timeout=timeout) as response:
                await self._read(path, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnreachable(f"{self.url}{path}: {reason}") from error
        if response.status != HTTPStatus.OK:
            raise EngineUnreachable(f"{self.url}{path} answered {response.status}")

    async def describe(self) -> EngineInfo:
        """Everything about the engine that does not change while it runs, and its adapters.

        Raises:
            EngineUnreachable: it does not answer (yet).
            EngineUnsuitable: it answers, but cannot be indexed; the message says what to change.
        """
        if not await self.is_healthy():
            raise EngineUnreachable(f"{self.url}/health does not answer 200")
        entries = await self.models()
        served = [entry for entry in entries if not entry.get("parent")]
        if not served:
            raise EngineUnreachable(f"{self.url}/v1/models lists no model")
        limit = served[0].get("max_model_len")
        return EngineInfo(
            models=tuple(entry["id"] for entry in served),
            model_root=str(served[0].get("root") or served[0]["id"]),
            adapters=adapters(entries),
            max_model_len_tokens=limit if isinstance(limit, int) else None,
            sources=await self._sources(),
            caches=await self._caches(),
            version=await self._version(),
        )

    async def _caches(self) -> dict[str, CacheConfig]:
        text = await self._metrics()
        try:
            caches = parse_cache_configs(text)
        except (ValueError, IndexError) as error:
            raise EngineUnreachable(f"{self.url}/metrics is unreadable: {error!r}") from error
        if not caches and CACHE_CONFIG in text:
            raise EngineUnreachable(
                f"{self.url}/metrics has vllm:cache_config_info without a block size so far"
            )
        return caches

    async def _sources(self) -> tuple[EventSource, ...] | None:
        status, body = await self._get("/kv_event_sources")
        if status in ABSENT:
            return None
        return tuple(parse_sources(self._json("/kv_event_sources", status, body)))

    async def _version(self) -> str | None:
        status, body = await self._get("/version")
        if status != HTTPStatus.OK:
            return None
        answer = self._json("/version", status, body)
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None

    async def _metrics(self) -> bytes:
        """The metrics text; empty when the engine has none."""
        status, body = await self._get("/metrics")
        if status in ABSENT:
            return b""
        if status != HTTPStatus.OK:
            raise EngineUnreachable(f"{self.url}/metrics answered {status}")
        return body

    def _json(self, path: str, status: int, body: bytes) -> Any:
        if status != HTTPStatus.OK:
            raise EngineUnreachable(f"{self.url}{path} answered {status}")
        try:
            return json.loads(body)
        except ValueError as error:
            raise EngineUnreachable(f"{self.url}{path} answered no JSON: {error}") from error

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with self._session.get(self.url + path) as response:
                return response.status, await self._read(path, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnreachable(f"{self.url}{path}: {reason}") from error

    async def _read(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > ANSWER_BYTES_MAX:
                raise EngineUnreachable(f"{self.url}{path}: an answer of over 16 MiB")
        return bytes(body)


def adapters(entries: tuple[Mapping[str, Any], ...]) -> tuple[str, ...]:
    """LoRA adapters among the entries of GET /v1/models: those with a parent."""
    return tuple(sorted(entry["id"] for entry in entries if entry.get("parent")))
