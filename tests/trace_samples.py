"""Tiny hand-written samples of every trace format, by name of the format."""

import json
from pathlib import Path

MOONCAKE = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]},
    {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 10, 11]},
]
BAILIAN = [
    {
        "chat_id": 159,
        "parent_chat_id": -1,
        "timestamp": 61.114,
        "input_length": 20,
        "output_length": 132,
        "type": "text",
        "turn": 1,
        "hash_ids": [1089, 1090],
    },
    {
        "chat_id": 160,
        "parent_chat_id": 159,
        "timestamp": 70.0,
        "input_length": 40,
        "output_length": 8,
        "type": "search",
        "turn": 2,
        "hash_ids": [1089, 1091, 1092],
    },
    {
        "chat_id": 161,
        "parent_chat_id": 7,
        "timestamp": 71.5,
        "input_length": 16,
        "output_length": 8,
        "type": "file",
        "turn": 5,
        "hash_ids": [5],
    },
]
AZURE = [
    {"TIMESTAMP": "2023-11-16 18:17:03.9799600", "ContextTokens": 200, "GeneratedTokens": 10},
    {"TIMESTAMP": "2023-11-16 18:17:04.0319601", "ContextTokens": 100, "GeneratedTokens": 0},
]


def _weka_request(t: float, tokens: int, hash_ids: list[int], **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": hash_ids, **more}


WEKA = [
    {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 128,
        "system_tokens": system_tokens,
        "requests": [
            _weka_request(0.0, 320, [1, 2, 3, 4, 5], think_time=0.0, api_time=2.0),
            {
                "t": 5.0,
                "type": "subagent",
                "agent_id": "agent_001",
                "tool_tokens": 64,
                "system_tokens": 0,
                "requests": [
                    _weka_request(0.0, 64, [70]),
                    _weka_request(9.0, 130, [70, 71], think_time=1.0),
                ],
            },
            _weka_request(10.0, 400, [1, 2, 3, 4, 5, 6], think_time=7.5),
        ],
    }
    for name, system_tokens in (("trace_1", 64), ("trace_2", 64), ("trace_3", 0))
]
LMCACHE = [
    {"timestamp": 5_000_000, "input": "abcdefgh" * 2, "output": "12345678", "session_id": "a"},
    {"timestamp": 2_000_000, "input": "abcdefgh", "output": "1234", "session_id": "a"},
    {"timestamp": 9_000_000, "input": "abcdefgX", "output": "1", "session_id": "b"},
]
TAU_BENCH = [
    {
        "task_id": 4,
        "reward": 0.0,
        "traj": [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "there you are"},
        ],
    }
]
RAGPULSE = [
    {
        "timestamp": "82",
        "input_length": 46,
        "output_length": 192,
        "hash_ids": {
            "sys_prompt": [1, 2],
            "passages_ids": [3],
            "history": [],
            "web_search": [],
            "user_input": [4],
        },
        "session_id": "s",
    },
    {
        "timestamp": "93",
        "input_length": 36,
        "output_length": 86,
        "hash_ids": {"sys_prompt": [1, 2], "web_search": [5], "user_input": [4]},
        "session_id": "t",
    },
]
RAGPULSE_COMPONENTS = [
    {"sys_prompt_id": 1, "token_length": 10},
    {"sys_prompt_id": 2, "token_length": 12},
    {"passage_id": 3, "token_length": 11},
    {"user_input_id": 4, "token_length": 7},
    {"web_search_id": 5, "token_length": 5},
]


def _rate(client: int, time_s: int, rate: float, family: str, shape: float) -> dict[str, object]:
    return {
        "chunk": client,
        "timestamp": time_s,
        "rate": rate,
        "cv": 1.0,
        "pat_name": family,
        "pat_arg1": shape,
        "pat_arg2": 9.0,
    }


SERVEGEN_RATES = [
    _rate(0, 0, 0.5, "Gamma", 0.2),
    _rate(1, 0, 0.0, "", 0.0),
    _rate(0, 600, 0.1, "Weibull", 0.5),
    _rate(1, 600, 0.2, "Gamma", 1.0),
]
SERVEGEN_LENGTHS = [
    {
        "chunk": 0,
        "timestamp": 0,
        "input_tokens": "{100: 0.25, 200: 0.75}",
        "output_tokens": "{7: 1.0}",
    },
    {"chunk": 1, "timestamp": 0, "input_tokens": "{}", "output_tokens": "{}"},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    """The rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
