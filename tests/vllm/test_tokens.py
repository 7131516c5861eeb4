"""The router's token ids against those of real engines."""

import json
from typing import Any

import pytest
from waiting import until_equal

from tests.vllm.fleet import RealFleet

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180, func_only=True),
]


async def test_engines_make_the_same_token_ids(fleet: RealFleet) -> None:
    """Each router has asked each engine for those of a text and of a chat."""

    async def said(url: str) -> list[Any]:
        view = json.loads(await fleet.text(f"{url}/fleet"))
        (one,) = view["fleets"]
        agree = [instance["tokenizer_agrees"] for instance in one["instances"]]
        return [one["tokenizer"]["state"], *agree]

    for url in fleet.router_urls:
        await until_equal(["loaded", True, True], lambda url=url: said(url))
