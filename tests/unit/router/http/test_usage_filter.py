"""Usage that the router has asked for does not reach a client who did not."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.usage_filter import HELD_BYTES_MAX, UsageFilter

USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3}}\n\n'
EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n',
    b'data: {"choices":[{"text":"\\"choices\\":[],\\"usage\\":{"}]}\n\n',
    b": ping\n\n",
    b'data: {"choices":[{"text":"b"}],"usage":{"prompt_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
]


def passed(*chunks: bytes) -> list[bytes]:
    """What goes on for each chunk, and at the end."""
    one = UsageFilter()
    return [*(one.passes(chunk) for chunk in chunks), one.rest()]


def test_only_usage_alone_is_taken_out() -> None:
    """Other events stay, in the chunks they came in."""
    chunks = [EVENTS[0] + EVENTS[1], EVENTS[2], EVENTS[3], USAGE, EVENTS[4]]
    assert passed(*chunks) == [*chunks[:3], b"", EVENTS[4], b""]
    chunks = [chunk.replace(b"\n", b"\r\n") for chunk in chunks]
    assert passed(*chunks) == [*chunks[:3], b"", chunks[4], b""]


@settings(max_examples=100)
@given(cuts=st.lists(st.integers(0, 400), max_size=8), line_end=st.sampled_from([b"\n", b"\r\n"]))
def test_however_the_stream_is_cut(cuts: list[int], line_end: bytes) -> None:
    """The same events come out, with the line ends that the engine writes."""
    stream = b"".join((*EVENTS[:4], USAGE, EVENTS[4])).replace(b"\n", line_end)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(places)]
    assert b"".join(passed(*chunks)) == b"".join(EVENTS).replace(b"\n", line_end)


def test_what_does_not_end_is_not_held_for_ever() -> None:
    """An event too long to be usage goes on, and the end of a stream gives back what is left."""
    assert passed(b"x" * (HELD_BYTES_MAX + 1), b"y") == [b"x" * (HELD_BYTES_MAX + 1), b"", b"y"]
