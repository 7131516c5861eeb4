"""Every trace format on a tiny sample, and what a faulty file is told."""

from pathlib import Path

import pytest
import trace_samples as samples

from loadgen.errors import TraceError
from loadgen.trace import TraceRow, read_trace
from loadgen.workloads.lines import zstd
from loadgen.workloads.options import ReadOptions
from loadgen.workloads.reading import Span, read_rows

UNIQUE = ReadOptions(prompts="unique", session_rate=1.0)


def _read(
    tmp_path: Path, *files: list[dict[str, object]], options: ReadOptions = UNIQUE, **span: object
) -> list[TraceRow]:
    paths = [samples.write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate(files)]
    return list(read_rows(paths, options, Span(**span)))


def test_streamed_rows_equal_those_read_whole(tmp_path: Path) -> None:
    """Formats that leave nothing open read alike in both ways."""
    path = samples.write(tmp_path / "t.jsonl", samples.MOONCAKE)
    assert read_trace(path).rows == tuple(read_rows([path], UNIQUE))


def test_bailian_names_sessions_by_their_first_request(tmp_path: Path) -> None:
    """Turns count from 0; a parent before the trace still names the session but is no row."""
    rows = _read(tmp_path, samples.BAILIAN)
    assert [(row.session_id, row.turn, row.parent_id) for row in rows] == [
        ("chat-159", 0, None),
        ("chat-159", 1, "159"),
        ("chat-7", 4, None),
    ]
    assert (
        [row.block_size_tokens for row in rows],
        [row.category for row in rows],
        rows[1].block_ids,
    ) == ([16] * 3, ["text", "search", "file"], (1089, 1091, 1092))
    assert tuple(rows) == read_trace(tmp_path / "0.jsonl").rows


def test_azure_counts_from_its_first_row_and_unique_prompts_share_nothing(tmp_path: Path) -> None:
    """All seven digits of the wall clock count; an answer of no tokens is one of one."""
    rows = _read(tmp_path, samples.AZURE)
    assert [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0.0, 200, 10),
        (0.0520001, 100, 1),
    ]
    assert [*(len(row.block_ids) for row in rows), len(_distinct(rows))] == [4, 2, 6]


def test_stated_reuse_is_the_leading_share_of_a_prompt(tmp_path: Path) -> None:
    """With one group and half of each prompt shared, the shorter prompt shares one block of two."""
    options = ReadOptions(prompts="reuse", reuse_ratio=0.7, reuse_groups_count=1)
    first, second = _read(tmp_path, samples.AZURE, options=options)
    assert (first.block_ids[:1], 5) == (second.block_ids[:1], len(_distinct([first, second])))


def test_weka_sessions_share_tools_and_system_prompts_of_equal_length(tmp_path: Path) -> None:
    """Two blocks of tools for all, a third for the two with equal system parts, then their own."""
    rows = _read(tmp_path, samples.WEKA)
    first, second, third = (row for row in rows if row.category == "main" and row.turn == 0)
    assert (first.block_ids[:3], first.block_ids[:2]) == (second.block_ids[:3], third.block_ids[:2])
    assert len(_distinct([first, second, third])) == 5 * 3 - 3 - 2
    follow_up = next(row for row in rows if row.request_id == "trace_1/1")
    assert first.block_ids == follow_up.block_ids[:5]
    own = ReadOptions(session_rate=1.0, shared_prefix=False)
    alone = [row for row in _read(tmp_path, samples.WEKA, options=own) if row.turn == 0]
    assert sum(len(row.block_ids) for row in alone) == len(_distinct(alone))


def test_weka_names_who_waits_for_whom(tmp_path: Path) -> None:
    """A sub-agent waits for the main request before it and for itself; main only for main."""
    rows = _read(tmp_path, samples.WEKA, lines_max=1)
    assert [(row.request_id, row.parent_id, row.think_s, row.arrival_s) for row in rows] == [
        ("trace_1/0", None, 0.0, 0.0),
        ("trace_1/1/0", "trace_1/0", 3.0, 5.0),
        ("trace_1/1/1", "trace_1/1/0", 1.0, 14.0),
        ("trace_1/1", "trace_1/0", 7.5, 10.0),
    ]
    assert [row.prompt_tokens for row in rows] == [320, 64, 130, 400]


def test_lmcache_sorts_a_conversation_and_its_text_becomes_blocks(tmp_path: Path) -> None:
    """Two tokens a block, four characters a token: equal leading text, equal leading ids."""
    options = ReadOptions(block_size_tokens=2)
    rows = _read(tmp_path, samples.LMCACHE, options=options)
    assert [
        (row.session_id, row.turn, row.arrival_s, row.prompt_tokens, row.output_tokens)
        for row in rows
    ] == [("a", 0, 0.0, 2, 1), ("a", 1, 3.0, 4, 2), ("b", 0, 7.0, 2, 1)]
    assert rows[0].block_ids == rows[1].block_ids[:1] != rows[2].block_ids
    as_text = _read(tmp_path, samples.LMCACHE, options=ReadOptions(text_as="text"))
    assert [row.text for row in as_text] == ["abcdefgh", "abcdefgh" * 2, "abcdefgX"]


def test_tau_bench_makes_a_request_of_each_assistant_message(tmp_path: Path) -> None:
    """Its prompt is all before it; the pause after a tool's message is stated in the row."""
    first, second = _read(
        tmp_path, samples.TAU_BENCH, options=ReadOptions(session_rate=1.0, text_as="text")
    )
    assert first.text == "system: rules\nuser: hello\n"
    assert second.text is not None
    assert second.text.startswith(first.text)
    assert second.text.endswith("tool: found\n")
    assert (first.think_s, first.category, second.category) == (None, "user", "tool")
    assert second.think_s is not None
    answer_s = 0.5 + 0.03 * (first.output_tokens - 1)
    assert second.arrival_s == pytest.approx(answer_s + second.think_s)


def test_ragpulse_lays_components_out_and_cuts_them_into_blocks(tmp_path: Path) -> None:
    """22 tokens of system prompt are two shared blocks of 8; the third is shared in part only."""
    options = ReadOptions(block_size_tokens=8)
    first, second = _read(tmp_path, samples.RAGPULSE_COMPONENTS, samples.RAGPULSE, options=options)
    assert first.block_ids[:2] == second.block_ids[:2]
    assert not {*first.block_ids[2:]} & {*second.block_ids[2:]}
    assert [
        (len(row.block_ids), row.arrival_s, row.session_id, row.category) for row in (first, second)
    ] == [(6, 82.0, "s", "passages_ids"), (5, 93.0, "t", "web_search")]


def test_servegen_sends_what_the_rates_say(tmp_path: Path) -> None:
    """300 requests in the first window, 60 and 120 in the second; lengths as distributed."""
    rows = _read(tmp_path, samples.SERVEGEN_RATES, samples.SERVEGEN_LENGTHS)
    counts = [
        sum(
            row.category == f"client-{client}" and start <= row.arrival_s < start + 600
            for row in rows
        )
        for client, start in ((0, 0), (1, 0), (0, 600), (1, 600))
    ]
    assert counts == pytest.approx([300, 0, 60, 120], abs=1)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert ({100, 200}, {7}) == (
        {row.prompt_tokens for row in rows},
        {row.output_tokens for row in rows},
    )
    share = sum(row.prompt_tokens == 200 for row in rows) / len(rows)
    assert share == pytest.approx(0.75, abs=0.07)


def test_slice_of_servegen_has_the_requests_of_the_whole(tmp_path: Path) -> None:
    """A window drawn alone equals the same window of the whole, counted from its start."""
    whole = _read(tmp_path, samples.SERVEGEN_RATES, samples.SERVEGEN_LENGTHS)
    part = _read(
        tmp_path, samples.SERVEGEN_RATES, samples.SERVEGEN_LENGTHS, from_s=600.0, duration_s=100.0
    )
    expected = [row.arrival_s - 600 for row in whole if 600 <= row.arrival_s < 700]
    assert part
    assert expected == pytest.approx([row.arrival_s for row in part])


def test_windows_of_servegen_are_drawn_apart(tmp_path: Path) -> None:
    """Equal rates in two windows of a client give other requests at other times."""
    rates = [{**samples.SERVEGEN_RATES[0], "timestamp": time_s} for time_s in (0, 600)]
    rows = _read(tmp_path, rates, samples.SERVEGEN_LENGTHS)
    offsets = [{round(row.arrival_s % 600, 3) for row in rows[:300]}]
    offsets.append({round(row.arrival_s % 600, 3) for row in rows[300:]})
    assert len(offsets[0] & offsets[1]) < 100


def test_mixed_traces_share_neither_blocks_nor_sessions(tmp_path: Path) -> None:
    """The same file twice is two workloads."""
    rows = _read(tmp_path, samples.BAILIAN, samples.BAILIAN)
    assert ({*rows[0].block_ids} & {*rows[3].block_ids}, "1:chat-159") == (
        set(),
        rows[3].session_id,
    )
    assert rows[4].parent_id == rows[3].request_id


def _distinct(rows: list[TraceRow]) -> set[int]:
    return {block for row in rows for block in row.block_ids}


@pytest.mark.parametrize(
    ("files", "options", "reason"),
    [
        ([samples.AZURE], ReadOptions(), r"line 1: .*choose --prompts unique"),
        ([samples.WEKA], ReadOptions(), r"line 1: .*--session_rate"),
        ([samples.TAU_BENCH], ReadOptions(), r"line 1: .*--session_rate"),
        ([samples.SERVEGEN_RATES], UNIQUE, "half of a trace; add the file of lengths"),
        ([samples.SERVEGEN_LENGTHS], UNIQUE, "half of a trace; add the file of rates"),
        ([samples.RAGPULSE], UNIQUE, "half of a trace; add the file of components"),
        (
            [samples.RAGPULSE, samples.RAGPULSE_COMPONENTS[1:]],
            UNIQUE,
            "component 1 of sys_prompt is not in the components file",
        ),
        ([[*samples.AZURE[::-1]]], UNIQUE, "line 2: TIMESTAMP is before that of the first row"),
        ([[{**samples.AZURE[0], "TIMESTAMP": "noon"}]], UNIQUE, "TIMESTAMP must be like"),
        ([[{**samples.WEKA[0], "hash_id_scope": "x"}]], UNIQUE, "hash_id_scope must be local"),
        (
            [[{**samples.WEKA[0], "block_size": 32}]],
            UNIQUE,
            "320 prompt tokens fill 10 blocks of 32, but hash_ids has 5",
        ),
        ([[{**samples.BAILIAN[0], "turn": 0}]], UNIQUE, "turn must count from 1"),
        (
            [[samples.LMCACHE[2], samples.LMCACHE[0]]],
            ReadOptions(),
            "begins before the file's first",
        ),
        ([[{**samples.LMCACHE[0], "input": 3}]], UNIQUE, "input must be a string"),
        (
            [[{**samples.SERVEGEN_RATES[0], "pat_name": "Cauchy"}], samples.SERVEGEN_LENGTHS],
            UNIQUE,
            "pat_name must be Gamma or Weibull",
        ),
        (
            [samples.SERVEGEN_RATES, [{**samples.SERVEGEN_LENGTHS[0], "input_tokens": "{a: 1}"}]],
            UNIQUE,
            r"input_tokens must look like \{value: probability",
        ),
        ([[{"foo": 1}]], UNIQUE, r"unknown trace format \(fields: foo\)"),
        ([[]], UNIQUE, "the file has no rows"),
    ],
)
def test_faulty_trace_is_named_with_what_to_change(
    tmp_path: Path, files: list[list[dict[str, object]]], options: ReadOptions, reason: str
) -> None:
    """File, line where there is one, and the reason."""
    with pytest.raises(TraceError, match=reason):
        _read(tmp_path, *files, options=options)


def test_replaying_an_unconverted_trace_names_the_command(tmp_path: Path) -> None:
    """read_trace takes no choices, so it sends the reader to convert."""
    path = samples.write(tmp_path / "t.jsonl", samples.AZURE)
    with pytest.raises(TraceError, match="python -m loadgen convert"):
        read_trace(path)


def test_zstandard_is_read_like_plain_text(tmp_path: Path) -> None:
    """The suffix decides; a truncated file is named."""
    plain = samples.write(tmp_path / "t.jsonl", samples.MOONCAKE)
    packed = tmp_path / "t.jsonl.zst"
    packed.write_bytes(zstd.compress(plain.read_bytes()))
    assert read_trace(plain).rows == read_trace(packed).rows
    packed.write_bytes(packed.read_bytes()[:-4])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(packed)
