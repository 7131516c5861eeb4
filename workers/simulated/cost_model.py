"""Duration of an engine step from what is in it: a roofline per step. Pure.

    step = overhead
         + max(tokens x linear_s_per_token, weights_s + experts_s x touched(tokens))
         + prefill query-key pairs x attention_s_per_pair
         + decode context tokens x kv_read_s_per_token

The linear layers are bound by arithmetic (many tokens) or by reading the weights (few tokens).
Prefill attention is bound by arithmetic, decode attention by reading the KV$. In a
mixture-of-experts model a step reads only the experts that some token of it is routed to:
touched(tokens) = 1 - (1 - expert_share)^tokens, as for uniform independent routing.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files

PROFILE_SUFFIX = ".toml"


class ProfileError(ValueError):
    """A profile does not exist or does not say what it must; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Coefficients of one accelerator and model.

    Attributes:
        step_overhead_s: fixed cost of a step: scheduling, launches, sampling.
        linear_s_per_token: linear layers, arithmetic.
        weights_s: reading the weights every step needs.
        experts_s: reading all experts; 0 for a dense model.
        expert_share: share of the experts one token is routed to, 0..1.
        attention_s_per_pair: prefill attention, per query-key pair.
        kv_read_s_per_token: decode attention, per token of context.
    """

    step_overhead_s: float
    linear_s_per_token: float
    weights_s: float
    experts_s: float
    expert_share: float
    attention_s_per_pair: float
    kv_read_s_per_token: float

    def step_s(self, *, tokens: int, prefill_pairs: float, decode_context_tokens: int) -> float:
        """Duration of one step, in seconds.

        Args:
            tokens: tokens computed in it, prefill and decode together.
            prefill_pairs: sum over prefill chunks of n x (start + (n + 1) / 2) for a chunk of n
                tokens behind `start` computed ones: each token attends to itself and all before.
            decode_context_tokens: sum of the context lengths of the decoding requests.
        """
        read_s = self.weights_s + self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)
        return (
            self.step_overhead_s
            + max(tokens * self.linear_s_per_token, read_s)
            + prefill_pairs * self.attention_s_per_pair
            + decode_context_tokens * self.kv_read_s_per_token
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A named cost model and what the device holds.

    Attributes:
        name: file name without suffix.
        cost: the coefficients.
        capacity_tokens: tokens of KV$ that fit the device beside the weights.
        kv_bytes_per_token: of KV$.
    """

    name: str
    cost: CostModel
    capacity_tokens: int
    kv_bytes_per_token: int


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    folder = files("workers.simulated") / "profiles"
    found = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(PROFILE_SUFFIX) for name in found if name.endswith(".toml"))


def load_profile(name: str) -> Profile:
    """The shipped profile of this name.

    Raises:
        ProfileError: there is none; the message lists the known ones.
    """
    if name not in profile_names():
        raise ProfileError(f"no profile named {name!r}; known: {', '.join(profile_names())}")
    path = files("workers.simulated") / "profiles" / f"{name}{PROFILE_SUFFIX}"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        model = table["model"]
        heads = 2 * model["layers"] * model["kv_heads"]  # of keys, and of values
        return Profile(
            name=name,
            cost=CostModel(**table["coefficients"]),
            capacity_tokens=table["capacity_tokens"],
            kv_bytes_per_token=heads * model["head_dim"] * model["bytes_per_value"],
        )
    except (KeyError, TypeError) as error:
        raise ProfileError(f"profile {name}: {error}") from error
