"""`python -m indexer drain`: no new requests for an engine, and wait until none is in flight."""

import asyncio
import sys
from typing import Any, Final

import aiohttp

from indexer.config import DrainConfig

EXIT_EMPTY: Final = 0
EXIT_BUSY: Final = 1
EXIT_UNREACHABLE: Final = 3

ASK_EVERY_S: Final = 0.25
ANSWER_DEADLINE_S: Final = 5.0
SETTLE_S: Final = 1.0
"""So long it has to be empty: a router that has just decided reserves after the drain."""

_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


async def drain(config: DrainConfig) -> int:
    """Drain and wait, or resume.

    Exit status: 0 done, 1 not known to be empty in time, 3 the sidecar did not answer at first; one
    that answered once is asked until the deadline.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        try:
            state = await _call(http, config, "POST", "resume" if config.resume else "drain")
        except _NO_ANSWER as error:
            _complain(config, error)
            return EXIT_UNREACHABLE
        if config.resume:
            _say(state)
            return EXIT_EMPTY
        return await _until_empty(http, config, state)


async def _until_empty(
    http: aiohttp.ClientSession, config: DrainConfig, state: dict[str, Any]
) -> int:
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + config.wait_s
    empty_s: float | None = None
    said: dict[str, Any] = {}
    while True:
        if state and state != said:
            _say(state)
            said = state
        is_empty = state.get("draining") is True and state.get("empty") is True
        empty_s = (empty_s or now_s()) if is_empty else None
        if empty_s is not None and now_s() - empty_s >= SETTLE_S:
            return EXIT_EMPTY
        if now_s() >= deadline_s:
            sys.stderr.write(f"error: still busy after {config.wait_s:g} s\n")
            return EXIT_BUSY
        await asyncio.sleep(ASK_EVERY_S)
        try:
            state = await _call(http, config, "GET", "state")
        except _NO_ANSWER as error:  # it drains all the same, and may answer the next time
            if state:
                _complain(config, error)
            state = {}


async def _call(
    http: aiohttp.ClientSession, config: DrainConfig, method: str, path: str
) -> dict[str, Any]:
    async with http.request(method, f"{config.sidecar_url.rstrip('/')}/{path}") as answer:
        answer.raise_for_status()
        state = await answer.json()
        if not isinstance(state, dict):
            raise ValueError(f"/{path} answers no object: is this a sidecar?")  # noqa: TRY004 - bad answer, not a bug
        return state


def _complain(config: DrainConfig, error: Exception) -> None:
    reason = str(error) or type(error).__name__
    sys.stderr.write(f"error: sidecar_url: {config.sidecar_url}: {reason}\n")


def _say(state: dict[str, Any]) -> None:
    shown = " ".join(f"{key}={str(value).lower()}" for key, value in state.items())
    sys.stdout.write(f"{shown}\n")
    sys.stdout.flush()
