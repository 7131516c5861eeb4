"""Where Redis is: what a URL says of servers, credentials, TLS and who leads; no I/O.

    redis://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/DB]        one server; of several the master
    rediss://...                                                 the same with TLS
    unix:///PATH                                                 one server
    redis+sentinel://[USER:PASSWORD@]HOST:PORT,.../SERVICE[/DB]  the master that Sentinel names
    redis+cluster://[USER:PASSWORD@]HOST:PORT,...                a cluster, by any of its nodes

`rediss+sentinel` and `rediss+cluster` are the same with TLS. Options of the query are redis-py's
(`?ssl_ca_certs=/ca.pem`); Sentinel's own credentials are `sentinel_username`, `sentinel_password`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import parse_url

PORT_DEFAULT: Final = 6379
SENTINEL_PORT_DEFAULT: Final = 26379
SERVERS_MAX: Final = 64
FIXED_OPTIONS: Final = ("decode_responses", "encoding", "encoding_errors", "protocol", "retry")
"""Of redis-py, on which the meaning of answers depends."""

SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
FORMS: Final = "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"


class Topology(StrEnum):
    """How the server to talk to is found."""

    SERVER = "server"  # it is the one named, or the one of several that says it is the master
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


class Server(NamedTuple):
    """Where one server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        """As in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A URL, understood.

    Attributes:
        topology: what the servers are.
        servers: in the order of the URL; empty for a unix socket.
        service: Sentinel's name of the master.
    """

    topology: Topology
    servers: tuple[Server, ...]
    service: str | None
    _base: SplitResult  # of one server's URL, its place left open
    _sentinel_base: SplitResult

    def url_of(self, server: Server | None) -> str:
        """What redis-py takes for one of the servers, a node or a master; None: the unix socket."""
        return _placed(self._base, server)

    def url_of_sentinel(self, server: Server) -> str:
        """What redis-py takes for one of the Sentinels."""
        return _placed(self._sentinel_base, server)


def parse(url: str) -> Address:
    """Understand a URL.

    Raises:
        ValueError: saying what is wrong with it; secrets are not repeated.
    """
    scheme, separator, _ = url.partition("://")
    transport, _, kind = scheme.partition("+")
    if (
        not separator
        or transport not in ("redis", "rediss", "unix")
        or (transport, kind)
        not in (
            ("unix", ""),
            *(("redis", k) for k in ("", "sentinel", "cluster")),
            *(("rediss", k) for k in ("", "sentinel", "cluster")),
        )
    ):
        raise ValueError(f"`{without_password(url)}` does not begin with {FORMS}")
    parts = urlsplit(url)
    credentials, at, places = parts.netloc.rpartition("@")
    topology = Topology(kind or "server")
    if transport == "unix":
        servers: tuple[Server, ...] = ()
    else:
        port_default = SENTINEL_PORT_DEFAULT if topology is Topology.SENTINEL else PORT_DEFAULT
        servers = tuple(_server(place, port_default) for place in places.split(","))
        if len(servers) > SERVERS_MAX:
            raise ValueError(f"{len(servers)} servers are more than {SERVERS_MAX}")
    path, service = parts.path, None
    if topology is Topology.SENTINEL:
        service, _, db = unquote(parts.path).strip("/").partition("/")
        if not service:
            raise ValueError("Sentinel's name of the master is missing: redis+sentinel://.../NAME")
        path = f"/{db}" if db else ""
    query = [(k, v) for k, v in parse_qsl(parts.query) if k not in SENTINEL_OPTIONS]
    base = SplitResult(transport, credentials + at, path, urlencode(query), "")
    address = Address(
        topology=topology,
        servers=servers,
        service=service,
        _base=base,
        _sentinel_base=_sentinel_base(transport, parts.query),
    )
    _check(address)
    return address


def without_password(url: str) -> str:
    """The same URL, fit for a log."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    before_query, question, query = rest.partition("?")
    credentials, at, place = before_query.rpartition("@")
    if credentials:
        credentials = credentials.partition(":")[0] + ":***"
    shown = [
        f"{key}={'***' if 'password' in key else value}"
        for key, _, value in (option.partition("=") for option in query.split("&"))
        if key
    ]
    return f"{scheme}{separator}{credentials}{at}{place}{question}{'&'.join(shown)}"


def _server(place: str, port_default: int) -> Server:
    """One HOST:PORT."""
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{error} (in `{place}`)") from None
    if not host:
        raise ValueError(f"`{place}` is not like HOST:PORT")
    return Server(host, port or port_default)


def _sentinel_base(transport: str, query: str) -> SplitResult:
    """Of a Sentinel's URL: TLS options are shared with the servers, credentials are its own."""
    options = dict(parse_qsl(query))
    own = {
        key.removeprefix("sentinel_"): options[key] for key in SENTINEL_OPTIONS if key in options
    }
    shared = {key: value for key, value in options.items() if key.startswith("ssl_")}
    return SplitResult(transport, "", "", urlencode(own | shared), "")


def _placed(base: SplitResult, server: Server | None) -> str:
    """One server's URL."""
    query = f"?{base.query}" if base.query else ""
    return f"{base.scheme}://{base.netloc}{server or ''}{base.path}{query}"


def _check(address: Address) -> None:
    """Let redis-py read what it will read when a connection is made."""
    url = address.url_of(address.servers[0] if address.servers else None)
    for option, _ in parse_qsl(urlsplit(url).query):
        if option in FIXED_OPTIONS:
            raise ValueError(f"the option {option} cannot be set; leave it out")
    try:
        db = parse_url(url).get("db", 0)
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]  # redis-py
        if address.topology is Topology.SENTINEL:
            sentinel = address.url_of_sentinel(address.servers[0])
            ConnectionPool.from_url(sentinel).make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise ValueError(str(error)) from None
    if address.topology is Topology.CLUSTER and db:
        raise ValueError(f"a cluster has no database {db}; leave it out")
