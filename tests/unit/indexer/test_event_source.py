"""Where events come from: discovery answers and addresses."""

import socket

import pytest

from indexer.engine.event_source import EventSource, must_bind, parse_sources, reachable
from indexer.errors import EngineUnsuitable

TOLD = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "buffer_steps": 10000,
    "topic": "kv",
}


def source(rank: int = 0, live: int = 5557, replay: int | None = 5558) -> EventSource:
    """A source of these ports."""
    return EventSource(
        rank=rank,
        endpoint=f"tcp://*:{live}",
        replay_endpoint=replay and f"tcp://*:{replay}",
        topic="kv",
    )


def test_map_by_rank() -> None:
    """VLLM 0.32 answers a map by rank."""
    assert [source()] == parse_sources({"0": TOLD})


def test_bare_array() -> None:
    """Another stored variant is an array with the rank inside, or without when there is one."""
    told = {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "kv"}
    assert [source(replay=None)] == parse_sources([{**told, "data_parallel_rank": None}])
    other = {**told, "data_parallel_rank": 1, "endpoint": "tcp://*:6000"}
    assert [source(replay=None), source(1, 6000, None)] == parse_sources([other, told])


def test_equal_ports_of_several_ranks_are_spread() -> None:
    """An engine adds the rank to its ports; where it tells the plain ones we do."""
    assert [source(), source(1, 5558, 5559)] == parse_sources({"1": TOLD, "0": TOLD})


def test_different_ports_are_left_alone() -> None:
    """Ports that already differ carry their rank."""
    second = {**TOLD, "endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5559"}
    assert [source(), source(1, 5558, 5559)] == parse_sources({"0": TOLD, "1": second})


@pytest.mark.parametrize(
    "change", [{"enable_kv_cache_events": False}, {"publisher": "null"}, {"endpoint": ""}]
)
def test_sources_that_publish_nothing(change: dict[str, object]) -> None:
    """Switched-off events are no source."""
    assert parse_sources({"0": TOLD | change}) == []


def test_ring_of_no_length_is_no_replay() -> None:
    """A publisher that keeps nothing answers replays with nothing: as good as none."""
    assert [source(replay=None)] == parse_sources({"0": TOLD | {"buffer_steps": 0}})


@pytest.mark.parametrize("answer", [7, "x", None, {"a": TOLD}, ["x"], {"0": 5}])
def test_unknown_answers(answer: object) -> None:
    """Any other answer is an error that names the options to use instead."""
    with pytest.raises(EngineUnsuitable, match="--event_endpoint"):
        parse_sources(answer)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://*:5557", "pod.local", "tcp://pod.local:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://:::5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.7", "tcp://10.1.1.1:5557"),
        ("ipc:///tmp/events", "10.0.0.7", "ipc:///tmp/events"),
    ],
)
def test_wildcards_are_the_engines_host(endpoint: str, host: str, expected: str) -> None:
    """An endpoint on every interface is reached where the engine is."""
    assert expected == reachable(endpoint, host)


@pytest.mark.parametrize("endpoint", ["", "5557", "tcp://host", "http://host:1"])
def test_what_is_no_endpoint(endpoint: str) -> None:
    """The error shows what an endpoint looks like."""
    with pytest.raises(EngineUnsuitable, match="tcp://host:port"):
        reachable(endpoint, "h")


def test_endpoint_inside_the_engine_is_refused() -> None:
    """No other process reaches an inproc endpoint; the error says which kind to use."""
    with pytest.raises(EngineUnsuitable, match="--kv-events-config"):
        reachable("inproc://events", "h")


@pytest.mark.parametrize(
    ("told", "topic"), [({}, None), ({"topic": ""}, ""), ({"topic": "k"}, "k")]
)
def test_topic_that_is_not_told_is_any(told: dict[str, object], topic: str | None) -> None:
    """An empty topic is one; only where none is told every topic is taken."""
    (only,) = parse_sources([{"endpoint": "tcp://*:5557", **told}])
    assert topic == only.topic


async def test_an_address_nobody_listens_at_is_ours_to_bind() -> None:
    """The publisher connects to such an address; one that listens is its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert not await must_bind(endpoint)
    assert await must_bind(endpoint)
    assert not await must_bind("tcp://*:5557")
    assert not await must_bind("ipc:///tmp/events")
