"""Sends one request of a trace to an OpenAI-compatible URL and records what happens.

Nothing is raised for what a server does: refusals, broken streams and deadlines become records.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from loadgen.errors import EndpointError
from loadgen.http_client import ConnectionFailedError, HttpClient, Origin
from loadgen.http_response import ResponseHead
from loadgen.records import RequestRecord
from loadgen.sse import EventScanner, MalformedStreamError, error_message
from loadgen.tokens import PromptTokens
from loadgen.trace import TraceRow

ERROR_BODY_BYTES_MAX = 64 << 10
ERROR_EXCERPT_CHARACTERS_MAX = 300
MODELS_TIMEOUT_S = 10.0
MODELS_BODY_BYTES_MAX = 1 << 20
_HTTP_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is measured and how requests to it look.

    Args:
        url: base URL, with or without a final `/v1`.
        model: name in the request.
        vocabulary_tokens: exclusive upper bound of generated token ids.
        token_seed: another seed gives every block other tokens, so nothing hits an older run's KV$.
        api_key: bearer token.
        headers: further request headers, e.g. {"x-timestable-explain": "1"}.
        connect_timeout_s: deadline of connecting.
        request_timeout_s: deadline of a whole request, from sending to its last byte.
    """

    url: str
    model: str
    vocabulary_tokens: int = 4096
    token_seed: int = 0
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if not name or not (name + value).isprintable() or ":" in name or " " in name:
                raise EndpointError(f"bad request header {name!r}: {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request ready to be sent: everything costly is done before its time comes."""

    row_index: int
    scheduled_s: float
    path: str
    body: bytes
    prompt_tokens: int
    headers: Mapping[str, str]


class StreamingClient:
    """Many requests at once to one target.

    Args:
        target: see there. Raises EndpointError for a URL that is none.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = HttpClient(
            Origin.parse(target.url), connect_timeout_s=target.connect_timeout_s
        )
        self._prompts = PromptTokens(
            vocabulary_tokens=target.vocabulary_tokens, seed=target.token_seed
        )
        self._headers = {"accept": "text/event-stream", "content-type": "application/json"}
        if target.api_key is not None:
            self._headers["authorization"] = f"Bearer {target.api_key}"
        self._headers.update(target.headers)

    def close(self) -> None:
        """Close the idle connections."""
        self._http.close()

    def prepare(self, row: TraceRow, *, row_index: int, scheduled_s: float) -> Call:
        """The call for a row: completion with token ids, or chat for a row with text."""
        if row.text is not None:
            path = "/v1/chat/completions"
            prompt = b'"messages":' + json.dumps([{"role": "user", "content": row.text}]).encode()
        else:
            path = "/v1/completions"
            prompt = b'"prompt":' + self._prompt_json(row)
        options = {
            "model": self._target.model,
            "max_tokens": row.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        session = {} if row.session_id is None else {"x-session-id": row.session_id}
        return Call(
            row_index=row_index,
            scheduled_s=scheduled_s,
            path=path,
            body=b"{" + json.dumps(options)[1:-1].encode() + b"," + prompt + b"}",
            prompt_tokens=row.prompt_tokens,
            headers={**session, **self._headers},
        )

    async def send(self, call: Call, *, start_s: float) -> RequestRecord:
        """Send a call now and follow its answer to the end.

        Args:
            call: made by `prepare`.
            start_s: the run's start on time.monotonic; all times of the record count from it.
        """
        request_id = f"loadgen-{uuid.uuid4().hex}"
        answer = _Answer()
        error: str | None = None
        try:
            async with asyncio.timeout(self._target.request_timeout_s):
                await self._http.request(
                    "POST",
                    call.path,
                    receiver=answer,
                    headers={**call.headers, "x-request-id": request_id},
                    body=call.body,
                    on_send=answer.on_send,
                )
        except TimeoutError:
            error = f"timeout: no end of the answer within {self._target.request_timeout_s} s"
        except ConnectionFailedError as exc:
            error = str(exc)
        except MalformedStreamError as exc:
            error = f"malformed: {exc}"
        except asyncio.CancelledError:
            # Only the run's own interruption cancels a request; what it got so far is a result.
            error = "interrupted"
        return answer.record(
            call, request_id=request_id, error=error, start_s=start_s, finished_s=time.monotonic()
        )

    def _prompt_json(self, row: TraceRow) -> bytes:
        if row.token_ids is not None:
            return json.dumps(row.token_ids).encode()
        return self._prompts.json_text(
            row.block_ids,
            prompt_tokens=row.prompt_tokens,
            block_size_tokens=row.block_size_tokens,
        )


async def first_model(url: str, *, api_key: str | None = None) -> str:
    """Name of the first model the URL serves.

    Raises:
        EndpointError: unreachable, refused, or no list of models; says to name the model.
    """
    answer = _WholeBody()
    http = HttpClient(Origin.parse(url), connect_timeout_s=MODELS_TIMEOUT_S)
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            await http.request("GET", "/v1/models", receiver=answer, headers=headers)
        models = json.loads(answer.body)["data"]
        return str(models[0]["id"])
    except TimeoutError as exc:
        raise EndpointError(f"{url}/v1/models: no answer within {MODELS_TIMEOUT_S} s") from exc
    except ConnectionFailedError as exc:
        raise EndpointError(f"{url}/v1/models: {exc}") from exc
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        excerpt = answer.body.decode(errors="replace")[:ERROR_EXCERPT_CHARACTERS_MAX]
        reason = f"{url}/v1/models names no model (status {answer.status}: {excerpt})"
        raise EndpointError(f"{reason}; give the name with --model") from exc
    finally:
        http.close()


class _WholeBody:
    """Receives a small answer."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""

    def on_head(self, head: ResponseHead) -> None:
        self.status = head.status

    def on_body(self, piece: bytes, _now_s: float) -> None:
        self.body += piece
        if len(self.body) > MODELS_BODY_BYTES_MAX:
            raise ConnectionFailedError(f"more than {MODELS_BODY_BYTES_MAX} bytes")


class _Answer:
    """Receives one answer: a token stream, or an error body of bounded length."""

    def __init__(self) -> None:
        self._sent_s: float | None = None
        self._sent_unix_s: float | None = None
        self._head: ResponseHead | None = None
        self._scanner = EventScanner()
        self._error_body = b""
        self.on_body: Callable[[bytes, float], None] = self._take_error_body

    def on_send(self) -> None:
        self._sent_s = time.monotonic()
        self._sent_unix_s = time.time()

    def on_head(self, head: ResponseHead) -> None:
        self._head = head
        if head.status == _HTTP_OK:
            self.on_body = self._scanner.feed

    def _take_error_body(self, piece: bytes, _now_s: float) -> None:
        room_bytes = ERROR_BODY_BYTES_MAX - len(self._error_body)
        self._error_body += piece[:room_bytes]

    def record(
        self,
        call: Call,
        *,
        request_id: str,
        error: str | None,
        start_s: float,
        finished_s: float,
    ) -> RequestRecord:
        """What came of the call. An error of the connection outranks what the body says."""
        status = None if self._head is None else self._head.status
        headers = {} if self._head is None else self._head.headers
        record = RequestRecord(
            request_id=request_id,
            row_index=call.row_index,
            scheduled_s=call.scheduled_s,
            sent_s=_since(start_s, self._sent_s),
            sent_unix_s=self._sent_unix_s,
            finished_s=_since(start_s, finished_s),
            status=status,
            error=error,
            prompt_tokens=call.prompt_tokens,
            instance=headers.get("x-timestable-instance"),
            decision=_json_header(headers.get("x-timestable-decision")),
        )
        if status is None:
            return record
        if status != _HTTP_OK:
            return replace(record, error=error or f"http {status}: {self._error_excerpt()}")
        end = self._scanner.close()
        return replace(
            record,
            error=error or end.error,
            first_token_s=_since(start_s, end.first_token_s),
            token_times_s=tuple(np.round(np.subtract(end.token_times_s, start_s), 6).tolist()),
            prompt_tokens=end.prompt_tokens or call.prompt_tokens,
            output_tokens=(
                len(end.token_times_s) if end.output_tokens is None else end.output_tokens
            ),
            cached_tokens=end.cached_tokens,
        )

    def _error_excerpt(self) -> str:
        text = error_message(self._error_body) or self._error_body.decode(errors="replace")
        return text.strip()[:ERROR_EXCERPT_CHARACTERS_MAX] or "(empty body)"


def _since(start_s: float, moment_s: float | None) -> float | None:
    """Seconds since the start, in whole microseconds so that saved records read back equal."""
    return None if moment_s is None else round(moment_s - start_s, 6)


def _json_header(value: str | None) -> Mapping[str, object] | None:
    if value is None:
        return None
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
