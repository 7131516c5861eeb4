"""Bodies that pass from an engine's connection to a client's without waking anybody."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.instances.engine_connection import EngineConnection
from router.instances.http_wire import ChunkedDecoder, Origin, chunk

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Taken:
    """A client's side that keeps what it gets and is full beyond a bound."""

    def __init__(self, full_bytes: int = 1 << 30) -> None:
        self.got = bytearray()
        self.gone = False
        self._full_bytes = full_bytes
        self._full: Callable[[], None] | None = None

    def write(self, chunks: bytes) -> bool:
        self.send(chunks)
        return self.is_full

    def send(self, chunks: bytes) -> None:
        if self.gone:
            raise RuntimeError("closed")
        was_full = self.is_full
        self.got += chunks
        if self._full is not None and self.is_full and not was_full:
            self._full()

    def on_full(self, full: Callable[[], None] | None) -> None:
        self._full = full

    @property
    def is_full(self) -> bool:
        return len(self.got) > self._full_bytes

    async def drain(self) -> None:
        self._full_bytes = 1 << 30

    def payload(self) -> bytes:
        """What a client reads of it."""
        return ChunkedDecoder().feed(bytes(self.got))


class Reading:
    """A transport of which only reading is asked."""

    def __init__(self) -> None:
        self.paused = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def write(self, data: bytes) -> None:
        del data

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        raise AssertionError("what came is well-formed")


def begun(transport: Any) -> EngineConnection:
    """A connection whose answer has begun with a head."""
    made = EngineConnection(Origin.of("http://h:1"), asyncio.get_running_loop())
    made.connection_made(transport)
    made.send(b"GET / HTTP/1.1\r\n\r\n", b"", to_head=False)
    made.data_received(HEAD)
    return made


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 300)),
    st.booleans(),
)
def test_a_body_passes_as_it_is_however_it_is_cut(
    payloads: list[bytes], cuts: list[int], per_chunk: bool
) -> None:
    """Payload, its length and its last pieces are those of the engine; the end is seen."""
    framed = [chunk(one) for one in payloads]
    wire = b"".join(framed) + END
    edges = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    pieces = [wire[a:b] for a, b in itertools.pairwise(edges)]

    async def run() -> None:
        client, tail = Taken(), deque[bytes](maxlen=4)
        made = begun(Reading())
        passing = asyncio.ensure_future(made.pass_on(client, tail, 5.0))
        await asyncio.sleep(0)
        for piece in [*framed, END] if per_chunk else pieces:
            made.data_received(piece)
        assert await passing
        whole = b"".join(payloads)
        assert client.payload() == whole
        assert made.passed_bytes == len(whole)
        assert whole.endswith(b"".join(tail))
        if per_chunk:
            assert list(tail) == payloads[-4:]
            assert bytes(client.got) == b"".join(framed)

    asyncio.run(run())


async def test_a_client_that_is_full_stops_the_engine_until_it_has_read() -> None:
    """Told once; and where it is full before the passing begins, at once."""
    client, transport, tail = Taken(full_bytes=10), Reading(), deque[bytes](maxlen=4)
    made = begun(transport)
    passing = asyncio.ensure_future(made.pass_on(client, tail, 5.0))
    await asyncio.sleep(0)
    made.data_received(chunk(b"a" * 8))
    assert not await passing
    assert transport.paused
    async with asyncio.timeout(5.0):
        assert not await made.pass_on(client, tail, 5.0)
    assert transport.paused
    await client.drain()
    passing = asyncio.ensure_future(made.pass_on(client, tail, 5.0))
    await asyncio.sleep(0)
    assert not transport.paused
    made.data_received(chunk(b"b"))
    made.data_received(END)
    assert await passing
    assert client.payload() == b"a" * 8 + b"b"


async def test_a_client_that_has_gone_ends_no_event_loop() -> None:
    """Between its end and its handler's cancelling chunks go nowhere, without an error."""
    client = Taken()
    made = begun(Reading())
    passing = asyncio.ensure_future(made.pass_on(client, deque(maxlen=4), 5.0))
    await asyncio.sleep(0)
    client.gone = True
    made.data_received(chunk(b"a"))
    passing.cancel()
    await asyncio.wait([passing])
    assert passing.cancelled()


async def test_an_engine_is_silent_after_its_last_chunk_only() -> None:
    """Chunks that pass do not note the time, and count all the same."""
    made = begun(Reading())
    loop = asyncio.get_running_loop()
    passing = asyncio.ensure_future(made.pass_on(Taken(), deque(maxlen=4), 0.08))
    begun_s = loop.time()
    while loop.time() - begun_s < 0.2:
        await asyncio.sleep(0.01)
        made.data_received(chunk(b"a"))
    assert not passing.done()
    last_s = loop.time()
    async with asyncio.timeout(5.0):
        await asyncio.wait([passing])
    assert isinstance(passing.exception(), TimeoutError)
    assert loop.time() - last_s > 0.05
