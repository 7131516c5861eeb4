"""What the flow tells siblings of a request, and sidecars of its answer."""

import pytest
from contract.prompts import depths_tokens
from route_parts import FakeParts, failure, make_call

from indexer.contract import block_hash
from router.requests.api_call import TokenPrompt


@pytest.mark.parametrize(("options", "counted"), [({}, True), ({"in_flight_credit": False}, False)])
async def test_a_long_prompt_is_known_to_its_siblings(
    options: dict[str, bool], counted: bool
) -> None:
    """By depths of its chain; a short one, or with the option off, by none."""
    long = TokenPrompt(packed=(block_hash.pack_tokens([1] * 100),))
    parts = FakeParts(call=make_call(prompt=long), block_size_tokens=4)
    await parts.routed(**options)
    assert [depths_tokens(m) if m else None for m in parts.milestones] == [
        [64, 80, 96, 100] if counted else None
    ]
    short = FakeParts()
    await short.routed(**options)
    assert short.milestones == [None]


async def test_an_answer_is_compared_with_its_prediction() -> None:
    """With the chain it was predicted from and what the engine reported, also when it broke off."""
    parts = FakeParts()
    await parts.routed()
    assert parts.settled == [("a", parts.lookups[0], None)]
    broken = FakeParts(breaks=failure("a", before_first_byte=False))
    await broken.routed()
    assert len(broken.settled) == 1
