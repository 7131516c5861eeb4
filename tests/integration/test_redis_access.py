"""TLS, user and password: who may talk to Redis, and what the others are told."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from builders import make_fleet_record, make_instance
from certificates import Certificates, make_certificates
from fleets import chain
from free_ports import free_ports
from redis.exceptions import NoPermissionError
from redis_servers import RedisServer, redis_server
from waiting import until

from indexer.contract import fleet_functions, functions, index_functions, keys, reservations, upkeep
from indexer.contract.identifiers import RouterId, SlotIndex
from indexer.contract.link import Link, connected

pytestmark = pytest.mark.integration

DEADLINE_S = 10.0
REDIS_WITH_TLS = shutil.which("redis-server")

ACL = (
    "~ts1:*",
    *("+@read", "+@write", "+fcall", "+fcall_ro", "+function|load", "+info", "+time"),
    *("+cluster|slots", "+readonly", "+asking"),
)
"""What a router or sidecar needs; the runbook says the same."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """What the servers of this module show and ask for."""
    return make_certificates(tmp_path_factory.mktemp("certificates") / "ours")


@asynccontextmanager
async def encrypted(server: RedisServer, certificates: Certificates) -> AsyncIterator[int]:
    """A port that wants TLS and a client's certificate, and passes everything on to a server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    context.load_verify_locations(certificates.authority)
    context.verify_mode = ssl.CERT_REQUIRED

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(
            pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True
        )

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


def options(authority: Path, shown: Certificates | None) -> str:
    """The query of a URL that verifies the server, and shows a certificate of its own."""
    own = f"&ssl_certfile={shown.certificate}&ssl_keyfile={shown.key}" if shown else ""
    return f"?ssl_cert_reqs=required&ssl_ca_certs={authority}{own}"


async def test_tls_with_certificates_on_both_ends(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Who trusts another authority is not connected, nor who shows no certificate."""
    foreign = make_certificates(tmp_path / "foreign")
    with redis_server(tmp_path / "redis") as server:
        await until(server.answers, "the server answers")
        async with encrypted(server, certificates) as port:
            url = f"rediss://127.0.0.1:{port}"
            ours = options(certificates.authority, certificates)
            async with connected(url + ours, deadline_s=DEADLINE_S) as link:
                assert await link.execute_command("ECHO", "x") == b"x"
            for wrong, says in (
                (options(foreign.authority, certificates), "CERTIFICATE_VERIFY_FAILED"),
                (options(certificates.authority, None), "no connection"),
            ):
                async with connected(url + wrong, deadline_s=DEADLINE_S) as link:
                    with pytest.raises(functions.REDIS_WEATHER, match=says):
                        await link.execute_command("ECHO", "x")


async def test_a_user_with_least_rights(tmp_path: Path) -> None:
    """ACL is enough for routers and sidecars; with a wrong password they are told so."""
    with redis_server(tmp_path / "redis") as server:
        await until(server.answers, "the server answers")
        await server.ask("ACL", "SETUSER", "us", "on", ">p@ss", *ACL)
        await server.ask("ACL", "SETUSER", "default", "off")
        at = f"127.0.0.1:{server.port}"
        async with connected(f"redis://us:p%40ss@{at}", deadline_s=DEADLINE_S) as link:
            await life(link)
            with pytest.raises(NoPermissionError):
                await link.execute_command("SET", "elsewhere", 1)
        async with connected(f"redis://us:wrong@{at}", deadline_s=DEADLINE_S) as link:
            with pytest.raises(functions.REDIS_WEATHER, match="username-password"):
                await link.execute_command("SMEMBERS", keys.directory())


async def life(link: Link) -> None:
    """A fleet is founded, listed, written, read, booked on and cleared away."""
    fleet, router = make_fleet_record(), RouterId("r")
    await functions.run(link, fleet_functions.create(fleet))
    joining = fleet_functions.join(fleet.fleet_id, make_instance("a").encode())
    assert await functions.run(link, joining) == [0, 1]
    await functions.run(link, upkeep.list_fleet(fleet.fleet_id))
    assert await link.execute_command("SMEMBERS", keys.directory()) == [fleet.fleet_id.encode()]
    hashes = chain(fleet, list(range(160)))
    slot = SlotIndex(0)
    calls = [
        index_functions.open_slot(fleet, slot, 1),
        index_functions.store(fleet, slot, 1, hashes),
    ]
    assert await functions.run_all(link, calls) == [1, 1]
    lookup = index_functions.lookup(fleet, 0, b"".join(hashes))
    assert await functions.run(link, lookup) == [10, b"\0"]
    await functions.run(link, reservations.register(fleet.fleet_id, router, begin=True))
    candidates = np.array([(0, 1, 16)], reservations.CANDIDATE)
    booking = reservations.reserve(fleet.fleet_id, router, 1, candidates)
    assert (await functions.run(link, booking))[0] == b"ok"
    assert await functions.run(link, reservations.reap(fleet.fleet_id, router))
    await functions.run(link, upkeep.measure(fleet, 0, [0, 1]))
    anchor = index_functions.anchor(fleet, 0)
    found = [key async for key in link.scan(anchor, keys.partition_pattern(anchor))]
    assert len(found) > 1
    assert await link.execute_command("UNLINK", *found) == len(found)


@pytest.mark.skipif(REDIS_WITH_TLS is None, reason="no redis-server that was built with TLS")
async def test_a_cluster_over_tls_with_user_and_password(
    tmp_path: Path, certificates: Certificates
) -> None:
    """Nodes are reached at their TLS ports, with the URL's credentials and options."""
    tls_port, bus_port = free_ports(2)
    with redis_server(
        tmp_path / "redis",
        *("--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
        *("--tls-port", str(tls_port), "--tls-cluster", "yes"),
        *("--tls-ca-cert-file", str(certificates.authority)),
        *("--tls-cert-file", str(certificates.certificate)),
        *("--tls-key-file", str(certificates.key)),
        binary=REDIS_WITH_TLS,
    ) as server:
        await until(server.answers, "the server answers")
        await server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: is_ok(server), "the cluster is whole")
        await server.ask("ACL", "SETUSER", "us", "on", ">p@ss", *ACL)
        await server.ask("ACL", "SETUSER", "default", "off")
        query = options(certificates.authority, certificates)
        url = f"rediss+cluster://us:p%40ss@127.0.0.1:{tls_port}{query}"
        async with connected(url, deadline_s=DEADLINE_S, read_replicas=True) as link:
            await life(link)


async def is_ok(server: RedisServer) -> bool:
    """Whether a node takes commands for its slots."""
    return "cluster_state:ok" in str(await server.ask("CLUSTER", "INFO"))
