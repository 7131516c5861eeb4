"""Recorded traffic: what a line says, what it never says, and what is not written."""

import io
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from route_parts import FakeParts, make_call
from waiting import until, until_equal

from indexer.contract import block_hash
from loadgen.conversations import previous_turns
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import read_rows
from router.recording.anonymous import ID_MAX, keyed
from router.recording.recorder import Recorder, RecordingUnavailable, recording
from router.recording.trace_lines import Answered, TraceLines

KEY = bytes(range(16))
TOKENS = list(range(1000, 1200))


def _hashes(tokens: list[int], size: int = 16) -> bytes:
    root = block_hash.root(model_scope="m", block_size_tokens=size)
    return block_hash.chain(root, block_hash.pack_tokens(tokens), size)


def _answered(tokens: list[int], **changes: Any) -> Answered:
    one = Answered(
        accepted_s=1.5,
        hashes=_hashes(tokens),
        block_size_tokens=16,
        prompt_tokens=len(tokens),
        output_tokens=9,
        kind="chat/completions",
        turn=0,
        session_id=None,
    )
    return replace(one, **changes)


def _count(result: str) -> float:
    name = "timestable_router_recorded_requests_total"
    return REGISTRY.get_sample_value(name, {"result": result}) or 0.0


def _line(lines: TraceLines, answered: Answered) -> dict[str, Any]:
    (line,) = lines.lines([answered])
    return dict(json.loads(line))


def _names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_ids_are_siphash_of_block_hashes() -> None:
    """The published test vector of 8 bytes, in the first of many words at once."""
    words = np.array([0x0706050403020100, 5], dtype=np.uint64)
    assert keyed(words, KEY)[0] == int.from_bytes(bytes.fromhex("6224939a79f5f593"), "little")


def test_a_line_has_the_formats_fields() -> None:
    """Lengths, time and kind as they were, an id for each block and one for the rest."""
    line = _line(TraceLines(KEY), _answered(TOKENS[:40]))
    ids = line.pop("hash_ids")
    assert line == {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 40,
        "output_length": 9,
        "type": "chat/completions",
        "turn": 1,
    }
    assert len(set(ids)) == 3
    assert all(0 <= one <= ID_MAX for one in ids)


def test_equal_prefixes_have_equal_ids_within_a_trace_alone() -> None:
    """Shared blocks are seen; the part beyond them, partly filled blocks and other keys are not."""
    lines = TraceLines(KEY)
    one, other = (
        _line(lines, _answered(tokens))["hash_ids"]
        for tokens in (TOKENS[:40], [*TOKENS[:20], *range(20)])
    )
    again = _line(TraceLines(b"x" * 16), _answered(TOKENS[:40]))["hash_ids"]
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
    assert not set(one) & set(again)
    assert not set(one) & set(np.frombuffer(_hashes(TOKENS[:40]), "<u8").tolist())


def test_turns_find_their_parents(tmp_path: Path) -> None:
    """By the client's session, else by the prompt that this one goes on from; as readers see it."""
    lines = TraceLines(KEY)
    answered = [
        _answered(TOKENS[:40]),  # 0
        _answered(TOKENS[:100], turn=1),  # 1 goes on from 0
        _answered(list(range(40)), session_id="s"),  # 2
        _answered(list(range(50, 90)), session_id="s"),  # 3: another prompt, the same session
        _answered(list(range(200, 260)), turn=4),  # 4: its parent was never seen
        _answered(TOKENS[:180], turn=2),  # 5 goes on from 1
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines.lines(answered)))
    rows = list(read_rows([path], ReadOptions()))
    assert [row.turn for row in rows] == [0, 1, 0, 1, 4, 2]
    assert previous_turns(rows) == (None, 0, None, 2, None, 1)
    assert len({row.session_id for row in rows}) == 3


def test_other_block_sizes_are_read_back(tmp_path: Path) -> None:
    """A fleet of larger blocks says so in each line."""
    path = tmp_path / "trace.jsonl"
    answered = _answered(TOKENS[:100], hashes=_hashes(TOKENS[:100], 64), block_size_tokens=64)
    path.write_bytes(b"".join(TraceLines(KEY).lines([answered])))
    (row,) = read_rows([path], ReadOptions())
    assert (row.block_size_tokens, len(row.block_ids), row.prompt_tokens) == (64, 2, 100)


def test_what_may_be_continued_is_bounded() -> None:
    """The least recently used is forgotten; its next turn is a session of its own."""
    lines = TraceLines(KEY, remembered_max=1)
    for tokens in (TOKENS[:40], TOKENS[50:90]):
        _line(lines, _answered(tokens))
    known = _line(lines, _answered(TOKENS[50:150], turn=1))
    forgotten = _line(lines, _answered(TOKENS[:100], turn=1))
    assert known["parent_chat_id"] == 2
    assert forgotten["parent_chat_id"] not in (1, 2, 3)


class _Disk(io.BytesIO):
    """A file that waits, or fails, when it is told to; its bytes outlive it."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.error: OSError | None = None
        self.lines = 0
        self.asked = False

    def write(self, data: Any) -> int:
        self.asked = True
        assert self.goes_on.wait(10)
        if self.error is not None:
            raise self.error
        self.lines += data.count(b"\n")
        return super().write(data)


async def _routed(recorder: Recorder, times: int = 1, **changes: Any) -> list[Any]:
    parts = FakeParts(call=make_call(**changes))
    return [await parts.routed(recorder=recorder) for _ in range(times)]


async def test_a_slow_disk_costs_requests_nothing() -> None:
    """What the writer has not come to is bounded; the rest is counted, every answer is given."""
    disk, before = _Disk(), _count("behind")
    disk.goes_on.clear()
    recorder = Recorder(disk, bytes_max=1 << 20, waiting_max=2)
    recorder.start()
    await _routed(recorder)
    await until(lambda: disk.asked, "the disk is asked")
    records = await _routed(recorder, 8)
    assert {record.outcome for record in records} == {"completed"}
    assert _count("behind") - before == 6  # one is being written, two wait
    disk.goes_on.set()
    recorder.close()
    assert disk.lines == 3


@pytest.mark.parametrize(("bytes_max", "error"), [(450, None), (1 << 20, OSError("no space"))])
async def test_a_full_file_and_a_failing_disk_end_the_recording(
    bytes_max: int, error: OSError | None
) -> None:
    """A bound reached or an error ends it for good; requests go on, and are counted."""
    result = "full" if error is None else "failed"
    disk, before = _Disk(), _count(result)
    disk.error = error
    recorder = Recorder(disk, bytes_max=bytes_max)
    recorder.start()
    records = await _routed(recorder, 6)
    await until_equal(6, lambda: disk.lines + _count(result) - before)
    assert {record.outcome for record in records} == {"completed"}
    assert disk.lines == (1 if error is None else 0)
    recorder.close()


async def test_several_prompts_are_not_written() -> None:
    """Of such a request only the first prompt's blocks are known: it is left out and counted."""
    disk, before = _Disk(), _count("several_prompts")
    recorder = Recorder(disk, bytes_max=1 << 20)
    recorder.start()
    await _routed(recorder, prompts_count=2)
    recorder.close()
    assert (disk.lines, _count("several_prompts") - before) == (0, 1)


async def test_an_earlier_trace_is_kept(tmp_path: Path) -> None:
    """Every start makes a file of its own; where none can be made, the option is named."""
    path = tmp_path / "trace.jsonl"
    for _ in range(3):
        async with recording(str(path), 1000) as recorder:
            assert recorder is not None
    assert _names(tmp_path) == ["trace.2.jsonl", "trace.3.jsonl", "trace.jsonl"]
    for impossible in (tmp_path / "missing" / "trace.jsonl", tmp_path / "zero\0.jsonl"):
        with pytest.raises(RecordingUnavailable, match="record_trace"):
            async with recording(str(impossible), 1000):
                pass
