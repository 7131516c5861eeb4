"""Reservations for whoever sends requests to engines itself: choose and book, tell, release.

A gateway with a data plane of its own asks where a request should go, as with `POST /route`, and
has it counted there by all routers from then on, like one that went through this router. It says
when the first token has come and when the answer has ended; what it forgets to say ends in time.
The reservation stands in this process's book, so the process that made it is told; when it dies,
its lease gives everything back.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from aiohttp import web

from router import telemetry
from router.errors import Overloaded, RequestInvalid, ReservationUnknown
from router.hold import Hold

HOLD_S: Final = 600.0
"""For whoever asks for no other length."""

HOLD_MAX_S: Final = 4 * 3600.0
"""As long as a request through the router may take, by default."""

HELD_MAX: Final = 16_384
"""At once, of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    hold: Hold
    ends: asyncio.TimerHandle


class Reservations:
    """Holds until they are released or their time is over."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold_s(self, request: web.Request) -> float:
        """How long a reservation may last, by the query's `hold_s`.

        Raises:
            RequestInvalid: it is no such length.
            Overloaded: there are as many as there may be.
        """
        asked = request.query.get("hold_s", str(HOLD_S))
        try:
            length_s = float(asked)
        except ValueError:
            length_s = math.nan
        if not 0 < length_s <= HOLD_MAX_S:
            raise RequestInvalid(
                f"hold_s: must be seconds above 0 and at most {HOLD_MAX_S:g}.", param="hold_s"
            )
        if len(self._held) >= HELD_MAX:
            raise Overloaded(f"{HELD_MAX} reservations are held here. Release some, or try later.")
        return length_s

    def keep(self, hold: Hold, length_s: float) -> dict[str, Any]:
        """Keep one until it is released; its name, and how long it may last in seconds."""
        name = uuid4().hex
        ends = asyncio.get_running_loop().call_later(length_s, self._end, name, "expired")
        self._held[name] = _Held(hold=hold, ends=ends)
        telemetry.HOLDS.labels(result="begun").inc()
        return {"reservation": name, "hold_s": length_s}

    async def prefilled(self, request: web.Request) -> web.Response:
        """The engine's first token has come. May be repeated."""
        name = _name(request)
        held = self._held.get(name)
        if held is None:
            raise ReservationUnknown(name)
        held.hold.prefilled()
        return web.json_response({"reservation": name})

    async def release(self, request: web.Request) -> web.Response:
        """The answer has ended, however."""
        name = _name(request)
        if not self._end(name, "released"):
            raise ReservationUnknown(name)
        return web.json_response({"reservation": name})

    def _end(self, name: str, result: str) -> bool:
        held = self._held.pop(name, None)
        if held is None:
            return False
        held.ends.cancel()
        held.hold.release()
        telemetry.HOLDS.labels(result=result).inc()
        return True


def _name(request: web.Request) -> str:
    return request.match_info["reservation"]
