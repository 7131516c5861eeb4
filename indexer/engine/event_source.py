"""Where an engine's KV events come from: what it tells, and the addresses to use."""

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from indexer.errors import EngineUnsuitable

PROBE_DEADLINE_S: Final = 1.0

_TCP = re.compile(r"tcp://(?P<host>\[[^\]]*\]|[^:\[\]]*|::):(?P<port>\d+)")
_PORT_MAX: Final = 65535

WILDCARD_HOSTS: Final = ("*", "::", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """Event sockets of one data-parallel rank, as the engine names them.

    Attributes:
        rank: data-parallel rank.
        endpoint: of the live events.
        replay_endpoint: where missed events can be asked for; None when nowhere.
        topic: first frame of its live events; None when nobody tells: any.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str | None


def parse_sources(answer: object) -> list[EventSource]:
    """Read the answer of GET /kv_event_sources: a map by rank, or an array with ranks inside.

    Returns the sources by rank, without those that publish nothing.

    Raises:
        EngineUnsuitable: the answer has neither shape.
    """
    try:
        sources = [_source(rank, source) for rank, source in _by_rank(answer) if _publishes(source)]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise EngineUnsuitable(
            f"GET /kv_event_sources answered something unknown ({error!r}); "
            "tell the sockets with --event_endpoint and --replay_endpoint"
        ) from error
    return spread(sorted(sources, key=lambda source: source.rank))


def _by_rank(answer: object) -> list[tuple[int, Mapping[str, Any]]]:
    if isinstance(answer, Mapping):
        return [(int(rank), source) for rank, source in answer.items()]
    if isinstance(answer, list):
        return [(int(source.get("data_parallel_rank") or 0), source) for source in answer]
    raise TypeError(type(answer).__name__)


def _publishes(source: Mapping[str, Any]) -> bool:
    enabled = source.get("enable_kv_cache_events", True)
    return bool(enabled and source.get("publisher", "zmq") == "zmq" and source.get("endpoint"))


def _source(rank: int, source: Mapping[str, Any]) -> EventSource:
    return EventSource(
        rank=rank,
        endpoint=str(source["endpoint"]),
        # A ring of no length answers every replay with nothing.
        replay_endpoint=(source.get("buffer_steps") != 0 and source.get("replay_endpoint")) or None,
        topic=_topic(source.get("topic")),
    )


def _topic(told: object) -> str | None:
    return told if told is None else str(told)


def spread(sources: Sequence[EventSource]) -> list[EventSource]:
    """Ports by rank: an engine adds the rank to the ports it was configured with.

    Sources that already differ are left alone.
    """
    if len({source.endpoint for source in sources}) == len(sources):
        return list(sources)
    return [
        replace(
            source,
            endpoint=_offset(source.endpoint, source.rank),
            replay_endpoint=source.replay_endpoint and _offset(source.replay_endpoint, source.rank),
        )
        for source in sources
    ]


def _offset(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        return f"{endpoint}_dp{rank}"
    return f"tcp://{match['host']}:{int(match['port']) + rank}"


def is_endpoint(text: str) -> bool:
    """Whether this is tcp://HOST:PORT with a port from 1 to 65535, or ipc://PATH."""
    match = _TCP.fullmatch(text)
    if match is None:
        return bool(re.fullmatch(r"ipc://.+", text))
    return bool(match["host"]) and 1 <= int(match["port"]) <= _PORT_MAX


def reachable(endpoint: str, engine_host: str) -> str:
    """The endpoint with the engine's host where it names every interface.

    Raises:
        EngineUnsuitable: it is not a ZMQ endpoint, or one inside the engine's process.
    """
    match = _TCP.fullmatch(endpoint)
    if match is None:
        if endpoint.startswith("ipc://"):
            return endpoint
        if endpoint.startswith("inproc://"):
            raise EngineUnsuitable(
                f"{endpoint!r} can only be reached inside the engine's process: start vLLM with an "
                "endpoint like tcp://*:5557 in --kv-events-config"
            )
        raise EngineUnsuitable(f"{endpoint!r} is no endpoint like tcp://host:port or ipc://path")
    if match["host"] not in WILDCARD_HOSTS:
        return endpoint
    host = f"[{engine_host}]" if ":" in engine_host else engine_host
    return f"tcp://{host}:{match['port']}"


async def must_bind(endpoint: str) -> bool:
    """Whether the publisher connects to this address, so that we have to bind it.

    A publisher binds wildcard and ipc endpoints. Any other address is either its own, then
    something listens there, or ours.
    """
    match = _TCP.fullmatch(endpoint)
    if match is None or match["host"] in WILDCARD_HOSTS:
        return False
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S):
            _, writer = await asyncio.open_connection(match["host"].strip("[]"), int(match["port"]))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
