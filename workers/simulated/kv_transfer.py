"""KV$ computed by one simulated engine and used by another, in the shapes of vLLM's NixlConnector.

    POST /v1/...  kv_transfer_params {do_remote_decode: true}           prefill: blocks stay held
                  answer's kv_transfer_params {do_remote_prefill: true, remote_...}
    POST /v1/...  those                                                 decode: takes the blocks,
                                                                        or lets them go, if refused

As there, an engine has no role: what it is asked decides. The side channel is two paths beside the
others: GET /kv_transfer/ID tells that the blocks are still held and renews their lease, DELETE
/kv_transfer/ID lets them go. Nothing but that is sent: the time of a transfer is slept.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from aiohttp import web

from workers.simulated.errors import malformed
from workers.simulated.protocol import Body

FIELD = "kv_transfer_params"
PATH = "/kv_transfer/{kept_id}"
SIDE_CHANNEL_DEADLINE_S = 2.0
"""One small answer of the other engine."""

BEATS_PER_LEASE = 3
"""How often a transfer renews the lease that it depends on."""

KEPT_MAX = 65_536
"""Prefilled requests held at once; one more is not held, and its answer says so."""

logger = logging.getLogger(__name__)


class TransferFailedError(Exception):
    """The other engine does not hold the blocks any more, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How KV$ is handed on.

    Attributes:
        bytes_per_s: bandwidth of one transfer.
        latency_s: of a transfer, however small; virtual seconds.
        bytes_per_token: of KV$.
        lease_s: how long blocks are held for somebody to take them; real seconds.
        recompute: compute a prompt whose blocks could not be had; else the request fails.
        speedup: virtual seconds that pass in a real one.
    """

    bytes_per_s: float
    latency_s: float
    bytes_per_token: int
    lease_s: float
    recompute: bool
    speedup: float

    def transfer_s(self, tokens: int) -> float:
        """Virtual seconds that the blocks of so many tokens take; none for none."""
        if not tokens:
            return 0.0
        return self.latency_s + tokens * self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a prompt's blocks are."""

    host: str
    port: int
    kept_id: str

    @property
    def url(self) -> str:
        """Of the side channel."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{PATH.format(kept_id=self.kept_id)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a request says of transfers.

    Attributes:
        keep: hold what is computed for another engine.
        source: who holds what this one needs.
    """

    keep: bool = False
    source: Source | None = None


NO_TRANSFER = Transfer()


def parse_transfer(body: Body) -> Transfer:
    """`kv_transfer_params`; like vLLM's, an incomplete source is warned of and not used.

    Raises:
        ApiError: it is no object.
    """
    params = body.mapping(FIELD)
    if not params.get("do_remote_prefill"):
        return Transfer(keep=bool(params.get("do_remote_decode")))
    match params:
        case {
            "remote_host": str(host),
            "remote_port": int(port),
            "remote_request_id": str(kept_id),
            "remote_engine_id": str(),
            "remote_block_ids": [_, *_],
        }:
            pass
        case _:
            logger.warning("Got invalid KVTransferParams: %s. No KV$ is transferred", params)
            return NO_TRANSFER
    if not kept_id.isalnum():
        raise malformed(f"{FIELD}.remote_request_id", "Input should be letters and digits")
    return Transfer(source=Source(host=host, port=port, kept_id=kept_id))


class KvKeeper:
    """What this engine holds for others, and how it takes what others hold for it.

    Args:
        options: of transfers.
        release: lets the blocks of a finished request go; called once for each that was kept.
    """

    def __init__(self, options: TransferOptions, release: Callable[[str], None]) -> None:
        self.options = options
        self.taking_count = 0
        """Requests whose blocks are on their way here."""
        self._beat_s = options.lease_s / BEATS_PER_LEASE
        self._release = release
        self._engine_id = uuid.uuid4().hex
        self._kept: dict[str, asyncio.TimerHandle] = {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def kept_count(self) -> int:
        """Finished requests whose blocks are held."""
        return len(self._kept)

    # -- prefill ----------------------------------------------------------------------------------

    def keep(
        self, request_id: str, block_ids: list[int], tokens: int, http: web.Request
    ) -> Mapping[str, object]:
        """Hold the blocks of a finished request until they are taken or the lease ends.

        Returns:
            What the answer's `kv_transfer_params` say.
        """
        if len(self._kept) >= KEPT_MAX or http.transport is None:
            self._release(request_id)
            return {}
        self._kept[request_id] = self._lease(request_id)
        host, port, *_ = http.transport.get_extra_info("sockname")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [block_ids],  # of the only group of caches
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def routes(self) -> list[web.RouteDef]:
        """The side channel."""
        return [web.get(PATH, self._tell), web.delete(PATH, self._let_go)]

    async def _tell(self, request: web.Request) -> web.Response:
        kept_id = request.match_info["kept_id"]
        lease = self._kept.get(kept_id)
        if lease is None:
            return web.Response(status=HTTPStatus.NOT_FOUND)
        lease.cancel()
        self._kept[kept_id] = self._lease(kept_id)
        return web.Response()

    async def _let_go(self, request: web.Request) -> web.Response:
        kept_id = request.match_info["kept_id"]
        lease = self._kept.pop(kept_id, None)
        if lease is None:
            return web.Response(status=HTTPStatus.NOT_FOUND)
        lease.cancel()
        self._release(kept_id)
        return web.Response()

    def _lease(self, request_id: str) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(self.options.lease_s, self._expire, request_id)

    def _expire(self, request_id: str) -> None:
        del self._kept[request_id]
        self._release(request_id)
        logger.warning("KV$ of request %s was not taken within its lease", request_id)

    # -- decode -----------------------------------------------------------------------------------

    async def take(self, source: Source, tokens: int) -> None:
        """Have the blocks of so many tokens; the other engine lets them go.

        Raises:
            TransferFailedError: they could not be had.
        """
        self.taking_count += 1
        try:
            left_s = self.options.transfer_s(tokens) / self.options.speedup
            await self._ask("GET", source)
            while left_s > self._beat_s:
                await asyncio.sleep(self._beat_s)
                await self._ask("GET", source)
                left_s -= self._beat_s
            await asyncio.sleep(left_s)
            await self._ask("DELETE", source)
        finally:
            self.taking_count -= 1

    async def reject(self, source: Source) -> None:
        """The request is refused here: the other engine need not hold its blocks."""
        with contextlib.suppress(TransferFailedError):
            await self._ask("DELETE", source)

    async def _ask(self, method: str, source: Source) -> None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=SIDE_CHANNEL_DEADLINE_S)
            self._session = aiohttp.ClientSession(timeout=timeout)
        try:
            async with self._session.request(method, source.url) as answer:
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TransferFailedError(f"{source.url}: {error!r}") from error
        if status != HTTPStatus.OK:
            raise TransferFailedError(f"{source.url} answered {status}")

    async def close(self, _: web.Application | None = None) -> None:
        """No more transfers."""
        for lease in self._kept.values():
            lease.cancel()
        if self._session is not None:
            await self._session.close()
