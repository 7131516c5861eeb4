"""Replays in every shape known, answered with golden frames by a real ROUTER."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from indexer.engine.history import Received, Replayed
from indexer.engine.subscriber import Subscriber

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "replay_frames.json").read_text())
DEADLINE_S = 10.0


@pytest.mark.parametrize("shape", GOLDEN["shapes"], ids=lambda shape: shape["name"])
async def test_recorded_replay_is_read_to_its_end(shape: dict[str, Any]) -> None:
    """The batch in a recorded reply is delivered as it is, and the end marker ends the replay."""
    request, reply, end = (
        [bytes.fromhex(frame) for frame in shape[f"{part}_hex"]]
        for part in ("request", "reply", "end")
    )
    context = zmq.asyncio.Context()
    with contextlib.ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        live, ring = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, ring)]
        endpoint, replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)

        async def answer() -> list[bytes]:
            client, *asked = await ring.recv_multipart()
            await ring.send_multipart([client, *reply])
            await ring.send_multipart([client, *end])
            return list(asked)

        async with (
            asyncio.timeout(DEADLINE_S),
            Subscriber(
                endpoint=endpoint, bind=False, replay_endpoint=replay_endpoint, topic=None
            ) as subscriber,
            asyncio.TaskGroup() as tasks,
        ):
            answering = tasks.create_task(answer())
            items = []
            async with contextlib.aclosing(subscriber.receive()) as receiving:
                async for item in receiving:
                    items.append(item)
                    if isinstance(item, Replayed):
                        break
            asked = await answering
    sequence = int.from_bytes(reply[-2], "big")
    assert [Received(sequence, reply[-1]), Replayed()] == [
        item for item in items if isinstance(item, Received | Replayed)
    ]
    assert (len(request), len(request[1])) == (len(asked), len(asked[1]))
    assert (asked[0], int.from_bytes(asked[1], "big")) == (b"", 0)
