"""vLLM plugin: which free KV block goes next depends on the category that used it last.

vLLM finds `register` under its entry points `vllm.general_plugins` and calls it in each of its
processes. Nothing changes unless TIMESTABLE_VLLM_EVICTION asks for it. Only vLLM and the standard
library are imported: this runs in vLLM's environment.
"""

import logging
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any, Final

from workers.vllm.plugin_versions import UntestedVersionError, check_version

EVICTION_VARIABLE: Final = "TIMESTABLE_VLLM_EVICTION"
LEAST_RECENTLY_USED: Final = "lru"
WORKLOAD_AWARE: Final = "workload_aware"

CATEGORY_HEADER: Final = "x-timestable-category"
"""Of a request to the API server: its category, as the router tells it."""

CATEGORY_ARGUMENT: Final = "timestable_category"
"""The same among a request's `vllm_xargs`, and what the header becomes on its way to the engine."""

CATEGORY_CHARACTERS_MAX: Final = 64

log = logging.getLogger("vllm.timestable.eviction")
"""Below vLLM's own logger, so that it is shown as vLLM's lines are."""


def register() -> None:
    """Replace vLLM's order of free blocks, if the operator wants that; may be called again.

    Raises:
        ValueError: the operator wants something else.
    """
    wanted = os.environ.get(EVICTION_VARIABLE, "") or LEAST_RECENTLY_USED
    if wanted == LEAST_RECENTLY_USED:
        return
    if wanted != WORKLOAD_AWARE:
        raise ValueError(
            f"{EVICTION_VARIABLE}={wanted}: must be {WORKLOAD_AWARE} or {LEAST_RECENTLY_USED}"
        )
    from vllm.version import __version__  # noqa: PLC0415  # not needed where the plugin is off

    try:
        check_version(__version__)
    except UntestedVersionError as error:
        log.error("%s=%s: %s", EVICTION_VARIABLE, wanted, error)  # noqa: TRY400  # no bug
        return
    from workers.vllm import workload_aware_pool  # noqa: PLC0415  # it needs this very vLLM

    workload_aware_pool.install()
    if serves_http():
        pass_header_on()
    log.info("free KV blocks are reused in workload-aware order")


def serves_http() -> bool:
    """Whether this process may be an API server, rather than an engine core or a worker."""
    name = multiprocessing.current_process().name
    return name == "MainProcess" or name.startswith("ApiServer")


def pass_header_on() -> None:
    """Let the category header reach the engine, among the request's extra arguments.

    Every generating endpoint reads trace headers and hands them to `AsyncLLM.add_request`, which
    drops them where tracing is off: the category takes that way, and leaves it there.
    """
    from vllm.entrypoints.serve.engine.serving import BaseServing  # noqa: PLC0415  # heavy
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415  # heavy

    if hasattr(BaseServing, "timestable_category"):
        return
    read_headers, add_request = BaseServing._get_trace_headers, AsyncLLM.add_request  # noqa: SLF001

    async def read_category(self: Any, headers: Mapping[str, str]) -> Mapping[str, str] | None:
        traced = await read_headers(self, headers)
        category = headers.get(CATEGORY_HEADER)
        return traced if category is None else {**(traced or {}), CATEGORY_HEADER: category}

    async def add_with_category(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        traced = kwargs.get("trace_headers")
        if traced and CATEGORY_HEADER in traced:
            rest = {name: value for name, value in traced.items() if name != CATEGORY_HEADER}
            kwargs["trace_headers"] = rest or None
            if hasattr(params, "extra_args"):  # sampling, not pooling
                told = {CATEGORY_ARGUMENT: traced[CATEGORY_HEADER]}
                # A router adds its header without knowing the body: what that says comes first.
                params.extra_args = {**told, **(params.extra_args or {})}
        return await add_request(self, request_id, prompt, params, *args, **kwargs)

    BaseServing._get_trace_headers = read_category  # noqa: SLF001
    AsyncLLM.add_request = add_with_category
    BaseServing.timestable_category = CATEGORY_HEADER


def category_of(request: Any) -> str | None:
    """What a request's extra arguments tell; None: nothing that can be used."""
    params = request.sampling_params
    if params is None or not params.extra_args:
        return None
    category = params.extra_args.get(CATEGORY_ARGUMENT)
    if not isinstance(category, str) or not 0 < len(category) <= CATEGORY_CHARACTERS_MAX:
        return None
    return category
