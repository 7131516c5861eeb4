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
from typing import Final
from uuid import uuid4

from aiohttp import web

from router import telemetry
from router.errors import Overloaded, RequestInvalid, ReservationUnknown
from router.hold import Hold

HOLD_S: Final = 600.0
"""A reservation lasts so long where its maker asks for no other length."""

HOLD_MAX_S: Final = 4 * 3600.0
"""At most; a request through the router may take as long (`total_timeout_s`, by default)."""

HELD_MAX: Final = 16_384
"""Reservations of one process at once."""


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

    def check_room(self) -> None:
        """Look whether one more may be held.

        Raises:
            Overloaded: there are as many as there may be.
        """
        if len(self._held) >= HELD_MAX:
            raise Overloaded(f"{HELD_MAX} reservations are held here. Release some, or try later.")

    def keep(self, hold: Hold, hold_s: float) -> str:
        """Keep one until it is released, or for so long; its id."""
        reservation_id = uuid4().hex
        ends = asyncio.get_running_loop().call_later(hold_s, self._end, reservation_id, "expired")
        self._held[reservation_id] = _Held(hold=hold, ends=ends)
        telemetry.HOLDS.labels(result="begun").inc()
        return reservation_id

    async def prefilled(self, request: web.Request) -> web.Response:
        """The engine's first token has come. May be repeated.

        Raises:
            ReservationUnknown: there is none of this id.
        """
        reservation_id = request.match_info["reservation"]
        held = self._held.get(reservation_id)
        if held is None:
            raise ReservationUnknown(reservation_id)
        held.hold.prefilled()
        return web.json_response({"reservation": reservation_id})

    async def release(self, request: web.Request) -> web.Response:
        """The answer has ended, however.

        Raises:
            ReservationUnknown: there is none of this id.
        """
        reservation_id = request.match_info["reservation"]
        if not self._end(reservation_id, "released"):
            raise ReservationUnknown(reservation_id)
        return web.json_response({"reservation": reservation_id})

    def _end(self, reservation_id: str, result: str) -> bool:
        held = self._held.pop(reservation_id, None)
        if held is None:
            return False
        held.ends.cancel()
        held.hold.release()
        telemetry.HOLDS.labels(result=result).inc()
        return True


def asked_hold_s(request: web.Request) -> float:
    """How long a reservation may last, by the query's `hold_s`.

    Raises:
        RequestInvalid: it is no such length.
    """
    try:
        hold_s = float(request.query.get("hold_s", HOLD_S))
    except ValueError:
        hold_s = math.nan
    if not 0 < hold_s <= HOLD_MAX_S:
        raise RequestInvalid(
            f"hold_s: must be seconds above 0 and at most {HOLD_MAX_S:g}.", param="hold_s"
        )
    return hold_s
