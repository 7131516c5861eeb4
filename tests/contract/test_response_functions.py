"""Who holds a response, on a real server: found as long as it is kept, in bounded room."""

import pytest
from contract.embedded_server import EmbeddedServer
from waiting import until

from indexer.contract import responses
from indexer.contract.identifiers import FleetId, InstanceId
from indexer.contract.limits import RESPONSES_PER_KEY_MAX
from indexer.contract.responses import Holder, id_digest

A = Holder.of(FleetId("f"), InstanceId("a:1/0#x"))
B = Holder.of(FleetId("f"), InstanceId("b:1/0#x"))


@pytest.fixture(autouse=True)
def _emptied(server: EmbeddedServer) -> None:
    server.redis.flushdb()


def found(server: EmbeddedServer, digest: bytes) -> Holder | None:
    """Who holds it."""
    packed = server.call(responses.find(digest))
    return None if packed is None else Holder.unpack(packed)


def alike(number: int) -> bytes:
    """Digests that all belong to one key."""
    return bytes(12) + number.to_bytes(4, "big")


def test_a_holder_is_found_under_its_id_alone(server: EmbeddedServer) -> None:
    """What was said last counts; nobody else's id leads there."""
    server.call(responses.hold(id_digest("resp_1"), A, kept_s=60))
    assert found(server, id_digest("resp_1")) == A
    assert found(server, id_digest("resp_2")) is None
    server.call(responses.hold(id_digest("resp_1"), B, kept_s=60))
    assert found(server, id_digest("resp_1")) == B


def test_an_instances_next_sidecar_is_the_same_holder() -> None:
    """The engine behind it holds what it held; another rank or port is somebody else."""
    same = Holder.of(FleetId("f"), InstanceId("a:1/0#y"))
    others = [Holder.of(FleetId("f"), InstanceId(name)) for name in ("a:1/1#x", "a:2/0#x")]
    assert same == A
    assert A not in others


async def test_what_is_kept_ends_though_others_of_its_key_stay(server: EmbeddedServer) -> None:
    """Each id has its own end; the key lives until its last one's."""
    server.call(responses.hold(alike(1), A, kept_s=60))
    server.call(responses.hold(alike(2), A, kept_s=1))
    assert found(server, alike(2)) == A
    await until(lambda: found(server, alike(2)) is None, "the shorter one has ended", 5)
    assert found(server, alike(1)) == A
    (key,) = server.redis.keys("ts1:{r:*")
    assert 50 < server.redis.ttl(key) <= 60


def test_a_full_key_gives_up_what_would_end_first(server: EmbeddedServer) -> None:
    """The number of ids is bounded, and the newest are found."""
    most = RESPONSES_PER_KEY_MAX
    for number in range(most + 10):
        server.call(responses.hold(alike(number), A, kept_s=100 + number))
    (key,) = server.redis.keys("ts1:{r:*")
    assert most * 7 // 8 < server.redis.hlen(key) <= most
    kept = [number for number in range(most + 10) if found(server, alike(number)) == A]
    assert kept == [*range(kept[0], most + 10)], "the later ones, all of them"
    # One that is there already needs no room.
    for number in range(most - len(kept)):
        server.call(responses.hold(alike(1000 + number), A, kept_s=1000))
    server.call(responses.hold(alike(most), B, kept_s=1000))
    assert found(server, alike(kept[0])) == A


async def test_a_full_key_gives_up_all_that_has_ended(server: EmbeddedServer) -> None:
    """Then there is room for many, and nothing that lives gives way."""
    for number in range(RESPONSES_PER_KEY_MAX):
        server.call(responses.hold(alike(number), A, kept_s=1 if number else 60))
    await until(lambda: found(server, alike(RESPONSES_PER_KEY_MAX - 1)) is None, "ended", 5)
    server.call(responses.hold(alike(RESPONSES_PER_KEY_MAX), B, kept_s=60))
    (key,) = server.redis.keys("ts1:{r:*")
    assert server.redis.hlen(key) == 2
    assert (found(server, alike(0)), found(server, alike(RESPONSES_PER_KEY_MAX))) == (A, B)


def test_values_from_elsewhere_are_nobody(server: EmbeddedServer) -> None:
    """A key of another kind is replaced; a value of another length is no holder."""
    call = responses.hold(alike(1), A, kept_s=60)
    (key,) = call.keys
    server.redis.set(key, "x")
    assert found(server, alike(1)) is None
    server.call(call)
    assert found(server, alike(1)) == A
    server.redis.hset(key, mapping={alike(2): b"short"})
    assert found(server, alike(2)) is None


def test_a_full_key_is_as_small_as_was_said(server: EmbeddedServer) -> None:
    """All 4,096 of them stay within what `RESPONSES_PER_KEY_MAX` says."""
    for number in range(RESPONSES_PER_KEY_MAX):
        server.call(responses.hold(alike(number), A, kept_s=1000))
    (key,) = server.redis.keys("ts1:{r:*")
    assert server.redis.memory_usage(key) <= 22e6 / 4096
