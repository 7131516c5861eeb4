"""The category of a request, told as the eviction plugin for vLLM takes it. Pure."""

from collections.abc import Mapping
from typing import Final

from workers.simulated.eviction.base import Category
from workers.simulated.protocol import Body

CATEGORY_HEADER: Final = "x-timestable-category"
CATEGORY_ARGUMENT: Final = "timestable_category"
CATEGORY_CHARACTERS_MAX: Final = 64


def category_of(headers: Mapping[str, str], body: Body) -> Category | None:
    """What `vllm_xargs` of the body tells, else the header; None: nothing that can be used.

    Raises:
        ApiError: `vllm_xargs` is no object.
    """
    arguments = body.mapping("vllm_xargs")
    told = arguments.get(CATEGORY_ARGUMENT, headers.get(CATEGORY_HEADER))
    if not isinstance(told, str) or not 0 < len(told) <= CATEGORY_CHARACTERS_MAX:
        return None
    return Category(told, 0)
