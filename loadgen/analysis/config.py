"""Options of `python -m loadgen analyze`; each field is one option of the command line."""

from dataclasses import dataclass

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from loadgen.workloads.options import PromptMaking


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """Say what the requests of traces reuse of each other.

    Hit ratios that caches of any size can have, with LRU and at best; who reuses what of whom, and
    after how long; working set; lengths. Reads every format of docs/traces.md, each trace by
    itself, side by side. Writes summary.json and report.html. See docs/analysis.md.

    Exit status: 0, 2 for a bad option or file, 130 after Ctrl-C.

    Args:
        traces: the files, before or after the options (.jsonl, .jsonl.gz, .jsonl.zst)
        output: folder of the results
        prompts: azure, servegen: unique = no prompt shares a token, reuse = each begins with ...
        reuse_ratio: ... this share of it in common with its group
        reuse_groups_count: azure: groups, of zipf popularity; in servegen a client is a group
        block_size_tokens: grain of block ids where the trace has none
        chars_per_token: prompts of text: characters of text per token
        session_rate: weka, tau-bench: sessions that begin per second; lmcache: instead of its own
        shared_prefix: weka: sessions with equal tool and system parts share them
        from_s: leave out what arrives before
        duration_s: and what arrives this long after from_s, or later
        rows_max: read no more requests than this
        lines_max: read no more lines of requests than this; conversations, in weka and tau-bench
        seed: of what the trace leaves open
    """

    traces: list[str]
    output: str = "build/analyze"
    prompts: PromptMaking | None = None
    reuse_ratio: ClosedUnitInterval = 0.5
    reuse_groups_count: PositiveInt = 20
    block_size_tokens: PositiveInt = 64
    chars_per_token: PositiveFloat = 4.0
    session_rate: PositiveFloat | None = None
    shared_prefix: bool = True
    from_s: NonNegativeFloat = 0.0
    duration_s: PositiveFloat | None = None
    rows_max: PositiveInt | None = None
    lines_max: PositiveInt | None = None
    seed: NonNegativeInt = 0
