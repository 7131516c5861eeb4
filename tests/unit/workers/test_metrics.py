"""The /metrics text: names, labels and histogram arithmetic."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from workers.simulated.cost_model import load_profile
from workers.simulated.engine import Engine, EngineConfig
from workers.simulated.metrics import EngineMetrics, Histogram
from workers.simulated.request import Request, pack_tokens


def make_engine() -> Engine:
    """A small engine."""
    return Engine(
        EngineConfig(
            cost=load_profile("a100-llama-3.1-8b").cost,
            block_size_tokens=4,
            capacity_blocks=10,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            output_ids=range(10),
        )
    )


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Parsed by the reference parser: (name, labels) -> value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_gauges_say_what_the_engine_holds() -> None:
    """Running, waiting and usage, under vLLM's labels."""
    engine = make_engine()
    for name in ("a", "b"):
        engine.add(Request(request_id=name, packed_prompt=pack_tokens(range(8)), output_tokens=2))
    engine.start_step()
    found = samples(EngineMetrics('m"x').render(engine))
    labels = frozenset({("model_name", 'm"x'), ("engine", "0")})
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [found[f"vllm:{name}", labels] for name in names] == [1.0, 1.0, 0.2]


def test_cache_config_tells_block_size_and_count() -> None:
    """The sidecar learns the engine's geometry here."""
    found = samples(EngineMetrics("m").render(make_engine()))
    (labels,) = [dict(labels) for name, labels in found if name == "vllm:cache_config_info"]
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("4", "10")


@pytest.mark.parametrize(
    "name",
    [
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:engine_sleep_state",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
    ],
)
def test_names_of_vllm_are_there(name: str) -> None:
    """The subset a sidecar or a dashboard reads."""
    found = samples(EngineMetrics("m").render(make_engine()))
    assert name in {sample for sample, _ in found}


def test_histogram_buckets_are_cumulative() -> None:
    """A value on a bound belongs to it; +Inf holds all."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    found = {
        (name, dict(labels).get("le")): value
        for (name, labels), value in samples(
            "\n".join(histogram.lines("h", 'a="b"')) + "\n"
        ).items()
    }
    assert found == {
        ("h_bucket", "1.0"): 2.0,
        ("h_bucket", "2.0"): 3.0,
        ("h_bucket", "+Inf"): 4.0,
        ("h_count", None): 4.0,
        ("h_sum", None): 12.0,
    }
