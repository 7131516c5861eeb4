"""Profiles: coefficients follow from their stated inputs, and step times behave."""

import json
import tomllib
from importlib.resources import files
from typing import Any

import pytest

from tests.benchmarks.cost_model_bench import SOURCES, a100_rows, h20_rows
from workers.simulated.cost_model import CostModel, ProfileError, load_profile, profile_names

DENSE = CostModel(
    step_overhead_s=1.0,
    linear_s_per_token=2.0,
    weights_s=10.0,
    experts_s=0.0,
    expert_share=0.0,
    attention_s_per_pair=0.5,
    kv_read_s_per_token=0.25,
)


def table(name: str) -> dict[str, Any]:
    """The profile as written."""
    path = files("workers.simulated") / "profiles" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def derived(profile: dict[str, Any]) -> dict[str, float]:
    """The coefficients by roofline, from device, model and efficiency."""
    device, model, efficiency = profile["device"], profile["model"], profile["efficiency"]
    flops_per_s = device["flops_per_s"] * efficiency["compute_ratio"]
    bytes_per_s = device["memory_bytes_per_s"] * efficiency["memory_ratio"]
    size_bytes = model["bytes_per_value"]
    share = model["experts_per_token"] / model["experts"] if model["experts"] else 0.0
    active_parameters = model["layer_parameters"] + share * model["expert_parameters"]
    read_parameters = model["layer_parameters"] + model["head_parameters"]
    pair_flops = 4 * model["layers"] * model["query_heads"] * model["head_dim"]
    kv_bytes = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * size_bytes
    return {
        "linear_s_per_token": 2 * active_parameters / flops_per_s,
        "weights_s": size_bytes * read_parameters / bytes_per_s,
        "experts_s": size_bytes * model["expert_parameters"] / bytes_per_s,
        "expert_share": share,
        "attention_s_per_pair": pair_flops / flops_per_s,
        "kv_read_s_per_token": kv_bytes / bytes_per_s,
    }


@pytest.mark.parametrize("name", profile_names())
def test_coefficients_follow_from_the_inputs(name: str) -> None:
    """Every coefficient of a profile is the roofline of its own inputs."""
    profile = table(name)
    stated = dict(profile["coefficients"])
    assert stated.pop("step_overhead_s") > 0
    assert derived(profile) == pytest.approx(stated, rel=1e-3)


@pytest.mark.parametrize("name", profile_names())
def test_capacity_is_what_the_weights_leave(name: str) -> None:
    """KV$ gets the device's memory times the share, minus all weights."""
    profile = table(name)
    model = profile["model"]
    kinds = ("layer", "expert", "head", "embedding")
    weights = sum(model[f"{kind}_parameters"] for kind in kinds) * model["bytes_per_value"]
    memory_bytes = profile["device"]["memory_bytes"]
    left_bytes = memory_bytes * profile["efficiency"]["memory_share_ratio"] - weights
    values = 2 * model["layers"] * model["kv_heads"] * model["head_dim"]
    assert int(left_bytes / (values * model["bytes_per_value"])) == profile["capacity_tokens"]


def test_h20_prefill_rate_is_the_measured_one() -> None:
    """A 4,096-token prompt prefills at the 16,594 tokens/s measured with SGLang, within 5 %."""
    cost = load_profile("h20-qwen3-30b-a3b").cost
    step_s = cost.step_s(tokens=4096, prefill_pairs=4096 * 4097 / 2, decode_context_tokens=0)
    assert 4096 / step_s == pytest.approx(16_594, rel=0.05)


def test_published_figures_are_met_within_a_third() -> None:
    """What docs/cost_model.md says of either profile: a third on the H20, a fifth on the A100."""
    sources = json.loads(SOURCES.read_text(encoding="utf-8"))
    assert max(abs(row.difference) for row in h20_rows(sources)) < 1 / 3
    assert max(abs(row.difference) for row in a100_rows(sources)) < 1 / 5


def test_few_tokens_cost_the_weights_and_many_their_arithmetic() -> None:
    """The linear layers take the larger of reading the weights and computing."""
    few = DENSE.step_s(tokens=3, prefill_pairs=0, decode_context_tokens=0)
    many = DENSE.step_s(tokens=9, prefill_pairs=0, decode_context_tokens=0)
    assert (few, many) == (1.0 + 10.0, 1.0 + 18.0)


def test_attention_terms_add_up() -> None:
    """Prefill pairs and decode context are charged on top."""
    step_s = DENSE.step_s(tokens=1, prefill_pairs=6, decode_context_tokens=8)
    assert step_s == 1.0 + 10.0 + 3.0 + 2.0


def test_unknown_profile_lists_the_known_ones() -> None:
    """A wrong name is answered with the right ones."""
    with pytest.raises(ProfileError, match=r"a100-llama-3[.]1-8b, h20-qwen3-30b-a3b"):
        load_profile("abacus")
