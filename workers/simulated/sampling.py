"""Sampling parameters: the simulated engine samples nothing, and refuses what vLLM refuses."""

from collections.abc import Callable, Mapping

from workers.simulated.errors import bad_request, malformed

TOP_K_OFF = -1

_BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 2, "in [0, 2]"),  # noqa: PLR2004
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),  # noqa: PLR2004
    "frequency_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),  # noqa: PLR2004
    "repetition_penalty": (lambda value: 0 < value < float("inf"), "greater than zero, and finite"),
}
"""Bounds and words of vLLM's `SamplingParams`; NaN is within none of them."""


def check_sampling(fields: Mapping[str, object]) -> None:
    """Check the sampling parameters of a body; absent and null ones are fine.

    Raises:
        ApiError: a 400 that names the first parameter of a wrong type or out of its bounds.
    """
    for name, (is_within, words) in _BOUNDS.items():
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise malformed(name, "Input should be a valid number")
        if not is_within(value):
            raise bad_request(f"{name} must be {words}, got {value!s:.40}.", name)
    top_k = fields.get("top_k")
    if top_k is None:
        return
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise malformed("top_k", "Input should be a valid integer")
    if top_k < TOP_K_OFF:
        raise bad_request("top_k must be 0 (disable), or at least 1.", "top_k")
