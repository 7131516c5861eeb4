"""Where Redis is: what a URL says of servers, credentials, TLS and who leads.

    redis://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/DB]        one server; of several the master
    rediss://...                                                 the same with TLS
    unix:///PATH                                                 one server
    redis+sentinel://[USER:PASSWORD@]HOST:PORT,.../SERVICE[/DB]  the master that Sentinel names
    redis+cluster://[USER:PASSWORD@]HOST:PORT,...                a cluster, by any of its nodes

`rediss+sentinel` and `rediss+cluster` are the same with TLS. Options of the query are those of
OPTIONS, as redis-py knows them (`?ssl_ca_certs=/ca.pem`); Sentinel's own credentials are
`sentinel_username`, `sentinel_password`. Files that options name are looked for, nothing else.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError

PORT_DEFAULT: Final = 6379
SENTINEL_PORT_DEFAULT: Final = 26379
SERVERS_MAX: Final = 64
SENTINEL_OPTIONS: Final = ("sentinel_username", "sentinel_password")
TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS: Final = (
    *(*TLS_FILES, "ssl_ca_path", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname"),
)
OPTIONS: Final = ("db", "username", "password", "client_name", *TLS_OPTIONS, *SENTINEL_OPTIONS)
"""Any other of redis-py's could change where it connects or what its answers mean."""

WORDS: Final = {
    "ssl_cert_reqs": ("none", "optional", "required"),
    "ssl_check_hostname": ("true", "false", "yes", "no", "1", "0"),
}
PORT_MAX: Final = 65535
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
    topology = Topology(kind or "server")
    parts = _split(url)
    options = _options(parts.query, topology, has_tls=transport == "rediss")
    credentials, at, places = parts.netloc.rpartition("@")
    if transport == "unix":
        if places or not parts.path.strip("/"):
            raise ValueError("a path is missing: unix:///PATH")
        servers: tuple[Server, ...] = ()
    else:
        port_default = SENTINEL_PORT_DEFAULT if topology is Topology.SENTINEL else PORT_DEFAULT
        servers = tuple(
            _server(*numbered, port_default) for numbered in enumerate(places.split(","), 1)
        )
        if len(servers) > SERVERS_MAX:
            raise ValueError(f"{len(servers)} servers are more than {SERVERS_MAX}")
    path, service = parts.path, None
    if topology is Topology.SENTINEL:
        service, _, db = unquote(parts.path).strip("/").partition("/")
        if not service:
            raise ValueError("Sentinel's name of the master is missing: redis+sentinel://.../NAME")
        path = f"/{db}" if db else ""
    if transport != "unix" and path not in ("", "/"):
        _check_db(path.removeprefix("/"))
        if "db" in options:
            raise ValueError("the database is named twice: in the path and as db")
    query = [(k, v) for k, v in options.items() if k not in SENTINEL_OPTIONS]
    base = SplitResult(transport, credentials + at, path, urlencode(query), "")
    address = Address(
        topology=topology,
        servers=servers,
        service=service,
        _base=base,
        _sentinel_base=_sentinel_base(transport, options),
    )
    _check(address)
    return address


def without_password(url: str) -> str:
    """The same URL, fit for a log."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    credentials, at, after = rest.rpartition("@")
    place, question, query = after.partition("?")
    if credentials:
        user, _, _ = credentials.partition(":")
        credentials = "***" if set(user) & set("/?#") else f"{user}:***"
    shown = [
        f"{key}={'***' if 'password' in key else value}"
        for key, _, value in (option.partition("=") for option in query.split("&"))
        if key
    ]
    return f"{scheme}{separator}{credentials}{at}{place}{question}{'&'.join(shown)}"


def _split(url: str) -> SplitResult:
    """Its parts; where a secret may be in the wrong one, nothing of it is repeated."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("this is not a URL; are user and password percent-encoded?") from None
    is_unix = parts.scheme == "unix"
    misplaced = parts.query if is_unix and not parts.netloc else parts.path + parts.query
    if "@" in misplaced or "#" in url or (is_unix and parts.netloc.rpartition("@")[2]):
        raise ValueError(
            "user, password and options have to be percent-encoded: "
            "`/` is %2F, `?` is %3F, `#` is %23, `@` is %40; and a path is like unix:///PATH"
        )
    return parts


def _options(query: str, topology: Topology, *, has_tls: bool) -> dict[str, str]:
    """Options by name, each known and with a value that it can have."""
    options: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        shown = key if re.fullmatch("[a-z_]+", key) else "of this name"
        if key not in OPTIONS:
            raise ValueError(f"there is no option {shown}; there are {', '.join(OPTIONS)}")
        if key in SENTINEL_OPTIONS and topology is not Topology.SENTINEL:
            raise ValueError(f"the option {key} needs redis+sentinel:// or rediss+sentinel://")
        if key in TLS_OPTIONS and not has_tls:
            raise ValueError(f"the option {key} needs TLS: rediss://")
        if key in options or not value:
            raise ValueError(f"the option {key} {'is there twice' if value else 'has no value'}")
        words = WORDS.get(key)
        if words and value.lower() not in words:
            raise ValueError(f"{key}: `{value}` is none of {', '.join(words)}")
        if key == "db":
            _check_db(value)
        if key in TLS_FILES and not Path(value).is_file():
            raise ValueError(f"{key}: there is no file `{value}`")
        if key == "ssl_ca_path" and not Path(value).is_dir():
            raise ValueError(f"{key}: there is no folder `{value}`")
        options[key] = value.lower() if words else value
    return options


def _check_db(db: str) -> None:
    if not re.fullmatch("[0-9]{1,9}", db):
        raise ValueError("Invalid value for 'db': a database is a whole number")


def _server(number: int, place: str, port_default: int) -> Server:
    """One HOST:PORT, the number-th; it is not repeated, as it may be a misread password."""
    try:
        parts = urlsplit(f"//{place}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"Port out of range 1-{PORT_MAX}, or no host: server {number}") from None
    if not host:
        raise ValueError(f"server {number} is not like HOST:PORT")
    if port == 0:
        raise ValueError(f"Port out of range 1-{PORT_MAX}: server {number}")
    return Server(host, port_default if port is None else port)


def _sentinel_base(transport: str, options: dict[str, str]) -> SplitResult:
    """Of a Sentinel's URL: TLS options are shared with the servers, credentials are its own."""
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
    try:
        db = parse_url(url).get("db", 0)
        ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]  # redis-py
        if address.topology is Topology.SENTINEL:
            sentinel = address.url_of_sentinel(address.servers[0])
            ConnectionPool.from_url(sentinel).make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError) as error:
        raise ValueError(str(error)) from None
    if address.topology is Topology.CLUSTER and db:
        raise ValueError(f"a cluster has no database {db}; leave it out")
