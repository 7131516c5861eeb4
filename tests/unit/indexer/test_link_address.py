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
        ("redis://a:1?retry_on_error=x", "no option retry_on_error"),
        ("redis://a:1?host=evil", "no option host"),
        ("redis://a:1?port=abc", "no option port"),
        ("redis://a:1?redis_connect_func=x", "no option redis_connect_func"),
        ("redis://a:1?credential_provider=x", "no option credential_provider"),
        ("redis://a:1?sentinel_password=x", "needs redis.sentinel"),
        ("redis://a:1?ssl_cert_reqs=none", "needs TLS"),
        ("redis://a:1?db=1&db=2", "db is there twice"),
        ("redis://a:1?client_name=", "client_name has no value"),
        ("rediss://a:1?ssl_cert_reqs=banana", "ssl_cert_reqs: `banana`"),
        ("rediss://a:1?ssl_check_hostname=banana", "ssl_check_hostname: `banana`"),
        ("rediss://a:1?ssl_ca_certs=/no/ca.pem", "ssl_ca_certs: there is no file"),
        ("rediss://a:1?ssl_certfile=/no/c.pem", "ssl_certfile: there is no file"),
        ("rediss://a:1?ssl_keyfile=/no/k.pem", "ssl_keyfile: there is no file"),
        ("rediss://a:1?ssl_ca_path=/no", "ssl_ca_path: there is no folder"),
        ("redis://a:0", "Port out of range"),
        ("redis://a:1/x", "whole number"),
        ("redis://a:1/1/2", "whole number"),
        ("redis://a:1/1?db=2", "named twice"),
        ("redis+sentinel://a:1/main/x", "whole number"),
        ("unix://", "path is missing"),
        ("unix://run/redis.sock", "unix:///PATH"),
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


@pytest.mark.parametrize("mark", ["/", "?", "#", "[", "%", ":", "\uff03"])
@pytest.mark.parametrize("scheme", ["redis", "rediss+sentinel", "redis+cluster", "unix", "http"])
def test_a_refusal_repeats_no_password(scheme: str, mark: str) -> None:
    """Also where a character that is not percent-encoded moves a part of it out of its place."""
    for place in ("h:x", "h:0", "h:1/x/y", "h:1?host=x"):
        for secret in (f"S3cr{mark}4et", f"77{mark}S3cr=4et"):
            with pytest.raises(ValueError, match=r".") as refused:
                parse(f"{scheme}://user:{secret}@{place}")
            assert not [part for part in ("S3cr", "4et", "77") if part in str(refused.value)]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://a:1", "redis://a:1"),
        ("redis://u:secret@a:1,b:2/0", "redis://u:***@a:1,b:2/0"),
        ("redis://:sec@ret@a:1", "redis://:***@a:1"),
        ("redis://u:sec?ret@a:1", "redis://u:***@a:1"),
        ("redis://a?password=sec@h", "redis://***@h"),
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
