"""An engine that keeps the answers of `/v1/responses` in its memory, as vLLM 0.32 does."""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from listening import listening


@dataclass
class HoldingEngine:
    """A real HTTP server in place of vLLM with its store switched on.

    Attributes:
        name: its instance id.
        held: by id.
        asked: method and path of each request, with the query string.
        status: of every answer, where it is not to be a good one.
        role: of its record.
    """

    name: str
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    status: int = 200
    role: str = "both"
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["HoldingEngine"]:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        async with listening(app) as self.url:
            yield self

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if request.path != "/v1/responses":
            return await self._named(request)
        body = await request.json()
        before = body.get("previous_response_id")
        if before is not None and before not in self.held:
            return _missing(before)
        response_id = body.get("request_id") or f"resp_{uuid.uuid4().hex}"
        made = {"id": response_id, "created_at": 1, "model": body.get("model"), "output": []}
        made |= {"previous": before, "status": "queued" if body.get("background") else "completed"}
        if body.get("store", True):
            self.held[response_id] = made
        if not body.get("stream"):
            return web.json_response(made)
        return await _streamed(request, made, 0)

    async def _named(self, request: web.Request) -> web.StreamResponse:
        response_id, *deed = request.path.removeprefix("/v1/responses/").split("/")
        made = self.held.get(response_id)
        if made is None:
            return _missing(response_id)
        if request.method == "DELETE":
            del self.held[response_id]
        if deed == ["cancel"]:
            made["status"] = "cancelled"
        if request.query.get("stream") == "true":
            return await _streamed(request, made, int(request.query.get("starting_after", -1)) + 1)
        return web.json_response(made)


async def _streamed(request: web.Request, made: dict[str, Any], first: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    kinds = ["created", "in_progress", "output_text.delta", "completed"]
    for number in range(first, len(kinds)):
        kind = f"response.{kinds[number]}"
        shown = {"item_id": "msg_1", "delta": "x"} if "delta" in kind else {"response": made}
        event = json.dumps(shown | {"sequence_number": number, "type": kind}, separators=(",", ":"))
        await response.write(f"event: {kind}\ndata: {event}\n\n".encode())
    await response.write_eof()
    return response


def _missing(response_id: str) -> web.Response:
    message = f"Response with id '{response_id}' not found."
    error = {"message": message, "type": "invalid_request_error", "param": "response_id"}
    return web.json_response({"error": error | {"code": 404}}, status=404)
