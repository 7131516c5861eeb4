"""Which endpoints vLLM binds."""

import pytest

from workers.simulated.publisher import EventPublisher, EventPublisherError, binds


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("inproc://events", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://events.local:5557", False),
    ],
)
def test_wildcards_and_local_transports_are_bound(endpoint: str, *, expected: bool) -> None:
    """Everything else is connected to."""
    assert binds(endpoint) is expected


def test_endpoint_in_use_is_named() -> None:
    """A taken port is a start-up error, not a stack trace from ZMQ."""
    first = EventPublisher(
        endpoint="tcp://127.0.0.1:*", replay_endpoint=None, topic="", buffer_steps=1
    )
    try:
        with pytest.raises(EventPublisherError, match=first.endpoint):
            EventPublisher(
                endpoint="tcp://127.0.0.1:*",
                replay_endpoint=first.endpoint,
                topic="",
                buffer_steps=1,
            )
    finally:
        first.close()
