"""The simulated engine's times against published measurements of real engines.

    python tests/benchmarks/cost_model_bench.py [--output build/bench/cost_model.json]

Each published figure is measured again on the simulated engine with the same lengths, batch and
token budget; `cost_model_sources.json` names where it was published and on what. Where the setup is
not that of a shipped profile, the one coefficient that differs is scaled and the row says so. Takes
a few seconds; no figure is fitted here. docs/cost_model.md judges the outcome.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from workers.simulated.cost_model import CostModel, load_profile
from workers.simulated.engine import EngineConfig
from workers.simulated.fast.engine import SpanEngine
from workers.simulated.fast.request import ChainRequest

SOURCES = Path(__file__).with_name("cost_model_sources.json")
BLOCK_SIZE = 16
BUDGET = 8192
A100_MEMORY_BYTES_PER_S = 2.039e12  # of the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, theirs and ours.

    Attributes:
        adapted: how our side differs from the shipped profile; empty: it does not.
    """

    profile: str
    what: str
    unit: str
    theirs: float
    ours: float
    source: str
    adapted: str = ""

    @property
    def difference(self) -> float:
        """Ours over theirs, less one."""
        return self.ours / self.theirs - 1


def play(
    cost: CostModel,
    lengths: Sequence[tuple[int, int]],
    *,
    batch: int = 1024,
    budget: int = BUDGET,
) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of (prompt, output) requests that all arrive at 0 and share nothing."""
    blocks = sum(-(-(prompt + output) // BLOCK_SIZE) for prompt, output in lengths)
    engine = SpanEngine(
        EngineConfig(
            cost=cost,
            block_size_tokens=BLOCK_SIZE,
            capacity_blocks=blocks,
            max_num_seqs=batch,
            max_num_batched_tokens=budget,
            output_ids=(),
        )
    )
    start = 0
    for number, (prompt, output) in enumerate(lengths):
        count = (prompt + output - 1) // BLOCK_SIZE
        engine.add(
            ChainRequest(
                request_id=str(number),
                prompt_tokens=prompt,
                output_tokens=output,
                blocks=np.arange(start, start + count),
            ),
            0.0,
        )
        start += count
    first_s, last_s = np.zeros(len(lengths)), np.zeros(len(lengths))
    engine.start(0.0)
    while (now_s := engine.ends_s) is not None:
        for request, first, last in engine.finish():
            if first:
                first_s[int(request.request_id)] = now_s
            if last:
                last_s[int(request.request_id)] = now_s
        engine.start(now_s)
    return first_s, last_s


def h20_rows(sources: Mapping[str, Any]) -> list[Row]:
    """Qwen3-30B-A3B on an H20."""
    name = "h20-qwen3-30b-a3b"
    cost = load_profile(name).cost
    rows = []
    qwen = sources["qwen_h20"]
    output = qwen["output_tokens"]
    for prompt, theirs in qwen["tokens_per_s_by_prompt"].items():
        _, last_s = play(cost, [(int(prompt), output)])
        rows.append(
            Row(
                profile=name,
                what=f"one request, {int(prompt):,} in, {output:,} out",
                unit="tokens/s",
                theirs=theirs,
                ours=(int(prompt) + output) / last_s[0],
                source="qwen_h20",
            )
        )
    infersim = sources["infersim_h20"]
    prompt = infersim["prompt_tokens"]
    first_s, _ = play(cost, [(prompt, 1)])
    rows.append(
        Row(
            profile=name,
            what=f"prefill, prompts of {prompt:,}",
            unit="tokens/s",
            theirs=infersim["prefill_tokens_per_s"],
            ours=prompt / first_s[0],
            source="infersim_h20",
            adapted="the profile's compute_ratio was chosen by this figure",
        )
    )
    devices, batch = infersim["decode_devices"], infersim["decode_batch"]
    context = prompt + infersim["output_tokens"] // 2
    step_s = replace(cost, experts_s=cost.experts_s / devices).step_s(
        tokens=batch, prefill_pairs=0.0, decode_context_tokens=batch * context
    )
    rows.append(
        Row(
            profile=name,
            what=f"decode, batch {batch}, {prompt:,} in, {infersim['output_tokens']:,} out",
            unit="tokens/s",
            theirs=infersim["decode_tokens_per_s"],
            ours=batch / step_s,
            source="infersim_h20",
            adapted="experts over four devices, no communication",
        )
    )
    return rows


def a100_rows(sources: Mapping[str, Any]) -> list[Row]:
    """Llama-3.1-8B on an A100."""
    name = "a100-llama-3.1-8b"
    cost = load_profile(name).cost
    rows = []
    given = sources["lambda_a100"]
    for count, outputs in given["output_lens"].items():
        # An empty answer was measured as no token; an engine computes one.
        lengths = list(
            zip(given["input_lens"][: int(count)], [max(1, n) for n in outputs], strict=True)
        )
        first_s, last_s = play(cost, lengths, budget=given["max_num_batched_tokens"])
        several = np.array([output > 1 for _, output in lengths])
        tokens = np.array([output for _, output in lengths])
        tpots_s = (last_s - first_s)[several] / (tokens[several] - 1)
        rows += [
            Row(
                profile=name,
                what=f"{count} requests at once, all answered",
                unit="s",
                theirs=given["duration_s"][count],
                ours=float(last_s.max()),
                source="lambda_a100",
            ),
            Row(
                profile=name,
                what=f"{count} requests at once, median TPOT",
                unit="s",
                theirs=given["tpot_median_s"][count],
                ours=float(np.median(tpots_s)),
                source="lambda_a100",
            ),
        ]
    given = sources["musgrave_a100"]
    prompt, output = given["prompt_tokens"], given["output_tokens"]
    slower = A100_MEMORY_BYTES_PER_S / given["memory_bytes_per_s"]
    small = replace(
        cost,
        weights_s=cost.weights_s * slower,
        kv_read_s_per_token=cost.kv_read_s_per_token * slower,
    )
    first_s, last_s = play(small, [(prompt, output)])
    rows.append(
        Row(
            profile=name,
            what=f"one request, {prompt:,} in, {output} out, decoding",
            unit="tokens/s",
            theirs=given["decode_tokens_per_s"],
            ours=float((output - 1) / (last_s[0] - first_s[0])),
            source="musgrave_a100",
            adapted="memory of the 40 GB device",
        )
    )
    _, one_s = play(small, [(prompt, output)])
    _, eight_s = play(small, [(prompt, output)] * 8)
    rows.append(
        Row(
            profile=name,
            what="8 requests at once over one at a time",
            unit="x",
            theirs=given["gain_at_8"],
            ours=float(8 * one_s[0] / eight_s.max()),
            source="musgrave_a100",
            adapted="memory of the 40 GB device",
        )
    )
    return rows


def main() -> None:
    """Print a table in Markdown and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/bench/cost_model.json"))
    args = parser.parse_args()
    sources = json.loads(SOURCES.read_text(encoding="utf-8"))
    rows = [*h20_rows(sources), *a100_rows(sources)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    written = [asdict(row) | {"difference": row.difference} for row in rows]
    args.output.write_text(json.dumps(written, indent=1) + "\n")
    print("| what | unit | published | ours | difference | note |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for row in rows:
        digits = 3 if row.unit == "s" and row.theirs < 1 else 1
        print(
            f"| {row.what} | {row.unit} | {row.theirs:,.{digits}f} | {row.ours:,.{digits}f} "
            f"| {row.difference:+.0%} | {row.adapted} |"
        )


if __name__ == "__main__":
    main()
