"""What clients may do on the wire before a request is there, and TLS on every side."""

import asyncio
import json
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from certificates import Certificates, make_certificates
from prometheus_client import REGISTRY
from router_edge import Edge, FakeEngine, completion, edge, plain
from waiting import until_equal

from indexer.config import SidecarConfig
from indexer.engine.engine_api import EngineApi
from indexer.engine.engine_tls import engine_context
from indexer.errors import EngineUnreachable

pytestmark = pytest.mark.integration

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


async def opened(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A plain connection."""
    return await asyncio.open_connection("127.0.0.1", port)


async def rest(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and body of the last answer, once the router has closed the connection."""
    async with asyncio.timeout(5.0):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def dripped(writer: asyncio.StreamWriter) -> None:
    """A head that makes progress, and takes a second."""
    for byte in HEAD * 10:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.03)


def refusals(cause: str) -> float:
    """Connections closed for this so far."""
    found = REGISTRY.get_sample_value(
        "timestable_router_connection_refusals_total", {"cause": cause}
    )
    return found or 0.0


async def test_headers_must_arrive_in_time(redis_client, redis_socket) -> None:
    """Drop by drop, too, and as the second request of a connection; idle ones stay meanwhile."""
    before = refusals("slow_headers")
    async with edge(redis_client, redis_socket, header_timeout_s=0.3) as one:
        port = one.process.listeners.port
        silent = await opened(port)
        dripping = await opened(port)
        second = await opened(port)
        idle = await opened(port)
        for _, writer in (second, idle):
            writer.write(HEAD + b"\r\n")
        for reader, _ in (second, idle):
            await reader.readuntil(b'{"status": "ok"}')
        second[1].write(b"GET /hea")
        drip = asyncio.ensure_future(dripped(dripping[1]))
        for reader, _ in (dripping, silent, second):
            status, said = await rest(reader)
            assert (status, said["error"]["code"]) == (408, "header-too-slow")
            drip.cancel()
        idle[1].write(HEAD + b"\r\n")
        assert await idle[0].readline() == b"HTTP/1.1 200 OK\r\n"
        for _, writer in (silent, dripping, second, idle):
            writer.close()
    assert refusals("slow_headers") == before + 3


async def test_an_idle_connection_is_closed(redis_client, redis_socket) -> None:
    """By the router, after the time for it."""
    async with edge(redis_client, redis_socket, client_keepalive_s=0.2) as one:
        reader, writer = await opened(one.process.listeners.port)
        writer.write(HEAD + b"\r\n")
        async with asyncio.timeout(5.0):
            assert (await reader.read()).endswith(b'{"status": "ok"}')
        writer.close()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, "request-malformed"),
        (b"GET / HTTP/1.1\r\nsecret header\r\n\r\n", 400, "request-malformed"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", 400, "request-malformed"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 400, "request-malformed"),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
            400,
            "request-malformed",
        ),
    ],
)
async def test_what_is_no_http_is_answered_like_anything_else(
    redis_client, redis_socket, sent, status, code
) -> None:
    """In our shape, without quoting it, and with a connection that ends."""
    async with edge(redis_client, redis_socket) as one:
        reader, writer = await opened(one.process.listeners.port)
        writer.write(sent)
        found, said = await rest(reader)
        writer.close()
    assert (found, said["error"]["code"]) == (status, code)
    assert "secret" not in json.dumps(said)


async def test_a_head_that_never_ends_is_cut_off(redis_client, redis_socket) -> None:
    """However many headers of a harmless size it is made of."""
    async with edge(redis_client, redis_socket) as one:
        reader, writer = await opened(one.process.listeners.port)
        writer.write(HEAD)
        for number in range(34):
            writer.write(b"h%d: " % number + b"x" * 2000 + b"\r\n")
            await asyncio.sleep(0.001)
        found, said = await rest(reader)
        writer.close()
    assert (found, said["error"]["code"]) == (431, "header-too-large")


async def test_connections_have_a_bound(redis_client, redis_socket) -> None:
    """One too many is told so; when one goes another may come. Operators have their own bound."""
    async with edge(redis_client, redis_socket, connections_max=2, admin_port=0) as one:
        await one.client.close()
        port = one.process.listeners.port
        first, second, third = [await opened(port) for _ in range(3)]
        status, said = await rest(third[0])
        assert (status, said["error"]["code"]) == (503, "connections-full")
        async with aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{one.process.listeners.admin_port}/health"
            async with client.get(url) as answer:
                assert answer.status == 200
        first[1].close()
        await until_equal(
            1,
            lambda: REGISTRY.get_sample_value("timestable_router_connections", {"port": "public"}),
        )
        fourth = await opened(port)
        fourth[1].write(HEAD + b"\r\n")
        assert await fourth[0].readline() == b"HTTP/1.1 200 OK\r\n"
        for _, writer in (second, third, fourth):
            writer.close()


def trusting(authority: Certificates, own: Certificates | None = None) -> ssl.SSLContext:
    """A client that trusts this authority alone, and shows a certificate if it has one."""
    context = ssl.create_default_context(cafile=str(authority.authority))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


async def health(port: int, context: ssl.SSLContext) -> int | str:
    """Status of a new connection's request, or what went wrong with it."""
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"https://127.0.0.1:{port}/health", ssl=context) as answer,
        ):
            return answer.status
    except aiohttp.ClientError as error:
        return type(error).__name__


def used(folder: Path, one: Certificates) -> dict[str, str]:
    """Copies of these under the names that the router is configured with."""
    folder.mkdir(exist_ok=True)
    for name, path in (("cert", one.certificate), ("key", one.key), ("ca", one.authority)):
        shutil.copy(path, folder / name)
    return {"tls_cert": str(folder / "cert"), "tls_key": str(folder / "key")}


async def test_both_ports_speak_tls_and_ask_for_certificates(
    redis_client, redis_socket, tmp_path
) -> None:
    """New files count on demand, for both ends; until then the old ones do."""
    old, new = make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new")
    options = used(tmp_path / "used", old) | {"tls_client_ca": str(tmp_path / "used" / "ca")}
    async with edge(redis_client, redis_socket, admin_port=0, **options) as one:
        listeners, reloading = one.process.listeners, one.process.reloading
        for port in (listeners.port, listeners.admin_port):
            assert await health(port, trusting(old, old)) == 200
            assert await health(port, trusting(old)) != 200
            assert await health(port, trusting(old, new)) != 200
        used(tmp_path / "used", new)
        assert await health(listeners.port, trusting(old, old)) == 200
        reloading.ask()
        await until_equal(200, lambda: health(listeners.port, trusting(new, new)))
        assert await health(listeners.port, trusting(new, old)) != 200
        assert await health(listeners.port, trusting(old, old)) != 200
        (tmp_path / "used" / "key").write_text("nonsense")
        reloading.ask()
        await asyncio.sleep(0.1)
        assert await health(listeners.port, trusting(new, new)) == 200


@dataclass(frozen=True, kw_only=True)
class TlsEngine:
    """Where it is, and the bodies that have reached it."""

    url: str
    bodies: list[bytes]


@asynccontextmanager
async def tls_engine(
    own: Certificates, *, asks_for: Certificates | None
) -> AsyncIterator[TlsEngine]:
    """An engine that shows `own`, and serves only who shows what this authority has signed."""
    bodies: list[bytes] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.json_response({"usage": {}})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own.certificate, own.key)
    if asks_for is not None:
        context.load_verify_locations(asks_for.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield TlsEngine(url=f"https://127.0.0.1:{runner.addresses[0][1]}", bodies=bodies)
    finally:
        await runner.cleanup()


async def asked(one: Edge) -> int:
    """Status of a completion."""
    async with one.client.post("/v1/completions", json=completion()) as answered:
        return answered.status


async def test_engines_are_asked_over_tls(redis_client, redis_socket, tmp_path) -> None:
    """If the configured authority has signed for them; nothing is sent to any other."""
    good, other = make_certificates(tmp_path / "good"), make_certificates(tmp_path / "other")
    async with tls_engine(good, asks_for=None) as engine:
        for authority, status in ((good, 200), (other, 502)):
            await redis_client.flushdb()
            stand_in, record = FakeEngine("a", plain), {"url": engine.url}
            ca = {"engine_ca": str(authority.authority)}
            async with edge(redis_client, redis_socket, stand_in, record=record, **ca) as one:
                assert await asked(one) == status
    assert len(engine.bodies) == 1


async def test_engines_that_ask_for_a_certificate_are_shown_one(
    redis_client, redis_socket, tmp_path
) -> None:
    """Requests and the router's own questions alike; a new one on demand, an unusable one never."""
    engines, old, new = (make_certificates(tmp_path / name) for name in ("e", "old", "new"))
    files = used(tmp_path / "used", old)
    options = {"engine_cert": files["tls_cert"], "engine_key": files["tls_key"]}
    options |= {"engine_ca": str(engines.authority), "ejection_ratio_max": 0, "keepalive_s": 0.01}
    async with (
        tls_engine(engines, asks_for=new) as engine,
        edge(
            redis_client,
            redis_socket,
            FakeEngine("a", plain),
            record={"url": engine.url},
            **options,
        ) as one,
    ):
        assert await asked(one) == 502
        assert not engine.bodies
        used(tmp_path / "used", new)
        (tmp_path / "used" / "key").write_text("nonsense")
        one.process.reloading.ask()
        await asyncio.sleep(0.1)
        assert await asked(one) == 502
        used(tmp_path / "used", new)
        one.process.reloading.ask()
        await until_equal(200, lambda: asked(one))


async def test_a_sidecar_shows_its_certificate_too(tmp_path) -> None:
    """Its questions are answered by an engine that serves nobody without one."""
    engines, own = make_certificates(tmp_path / "e"), make_certificates(tmp_path / "own")
    shown = {"engine_cert": str(own.certificate), "engine_key": str(own.key)}
    async with tls_engine(engines, asks_for=own) as engine:
        for options, is_healthy in (({}, False), (shown, True)):
            config = SidecarConfig(engine_ca=str(engines.authority), **options)
            async with EngineApi(engine.url, api_key=None, tls=engine_context(config)) as api:
                with nullcontext() if is_healthy else pytest.raises(EngineUnreachable):
                    assert await api.is_healthy()


@pytest.mark.parametrize("query", ["", "?a=1"])
async def test_a_client_that_asks_first_is_told_to_go_on(redis_client, redis_socket, query) -> None:
    """Before its body, on paths that are found at once and on those that are searched for."""
    async with edge(redis_client, redis_socket) as one:
        reader, writer = await opened(one.process.listeners.port)
        head = f"POST /v1/completions{query} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        async with asyncio.timeout(5.0):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        status, said = await rest(reader)
        assert (status, said["error"]["param"]) == (400, "model")
        writer.close()
