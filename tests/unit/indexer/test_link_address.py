"""What a Redis URL says."""

import pytest

from indexer.contract.link.address import Server, Topology, parse, without_password

SERVER, SENTINEL, CLUSTER = Topology.SERVER, Topology.SENTINEL, Topology.CLUSTER
A, B = Server("a", 1), Server("b", 2)


@pytest.mark.parametrize(
    ("url", "topology", "servers", "urls"),
    [
        ("redis://a:1", SERVER, (A,), ["redis://a:1"]),
        ("redis://a", SERVER, (Server("a", 6379),), ["redis://a:6379"]),
        ("redis://u:p@a:1,b:2/3", SERVER, (A, B), ["redis://u:p@a:1/3", "redis://u:p@b:2/3"]),
        ("redis://u:p%40@a:1?db=2", SERVER, (A,), ["redis://u:p%40@a:1?db=2"]),
        (
            "rediss://a:1?ssl_cert_reqs=required",
            SERVER,
            (A,),
            ["rediss://a:1?ssl_cert_reqs=required"],
        ),
        ("redis+cluster://[::1]:1,b:2", CLUSTER, (Server("::1", 1), B), ["redis://[::1]:1"]),
        ("rediss+cluster://:p@a:1", CLUSTER, (A,), ["rediss://:p@a:1"]),
        ("redis+sentinel://a,b:2/main", SENTINEL, (Server("a", 26379), B), ["redis://a:26379"]),
    ],
)
def test_a_url_names_topology_and_servers(url, topology, servers, urls) -> None:
    """Each server gets a URL of its own, with the credentials and options of the whole."""
    address = parse(url)
    assert (address.topology, address.servers) == (topology, servers)
    assert [address.url_of(server) for server in servers][: len(urls)] == urls


def test_a_unix_socket_is_one_server_without_a_place() -> None:
    """Path, credentials and database stay as they are."""
    address = parse("unix://u:p@/run/redis.sock?db=1")
    assert (address.servers, address.url_of(None)) == ((), "unix://u:p@/run/redis.sock?db=1")


def test_sentinels_have_credentials_of_their_own() -> None:
    """The servers' are not sent to Sentinel, nor the other way; TLS is shared."""
    url = "rediss+sentinel://u:p@a:1/main/2?sentinel_password=s&ssl_cert_reqs=none"
    address = parse(url)
    assert address.service == "main"
    assert address.url_of_sentinel(A) == "rediss://a:1?password=s&ssl_cert_reqs=none"
    assert address.url_of(B) == "rediss://u:p@b:2/2?ssl_cert_reqs=none"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("a:6379", "does not begin with"),
        ("http://a", "does not begin with"),
        ("unix+cluster:///x", "does not begin with"),
        ("redis+sharded://a", "does not begin with"),
        ("redis://", "not like HOST:PORT"),
        ("redis://a:1,,b:2", "not like HOST:PORT"),
        ("redis://a:70000", "Port out of range"),
        ("redis://a:1?db=x", "Invalid value for 'db'"),
        ("redis://a:1?novelty=1", "novelty"),
        ("redis://a:1?decode_responses=1", "decode_responses"),
        ("redis+sentinel://a:1", "name of the master is missing"),
        ("redis+cluster://a:1/2", "no database 2"),
        ("redis://" + ",".join(f"h{n}:1" for n in range(65)), "65 servers"),
    ],
)
def test_a_bad_url_is_refused_by_what_is_wrong_with_it(url: str, says: str) -> None:
    """At start, not when the first connection fails."""
    with pytest.raises(ValueError, match=says):
        parse(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://a:1", "redis://a:1"),
        ("redis://u:secret@a:1,b:2/0", "redis://u:***@a:1,b:2/0"),
        ("redis://:sec@ret@a:1", "redis://:***@a:1"),
        (
            "redis+sentinel://a/m?sentinel_password=secret&ssl_ca_certs=/ca",
            "redis+sentinel://a/m?sentinel_password=***&ssl_ca_certs=/ca",
        ),
        ("nonsense:secret@a", "nonsense:***@a"),
    ],
)
def test_a_log_shows_no_password(url: str, shown: str) -> None:
    """Whatever the URL is, also one that is refused."""
    assert without_password(url) == shown
