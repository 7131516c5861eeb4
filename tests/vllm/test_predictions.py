"""Predicted hit tokens against the cached tokens that real engines report."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from waiting import until

from tests.vllm.asking import Asked, Asker, at_once
from tests.vllm.cases import Report
from tests.vllm.fleet import RealFleet
from tests.vllm.prompts import Prompts
from tests.vllm.settings import ADAPTERS, BLOCK, CAPACITY_BLOCKS, NAME

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180, func_only=True),
]


def instances(asked: Sequence[Asked]) -> set[str | None]:
    """Who answered."""
    return {one.instance_id for one in asked}


async def second_copies(fleet: RealFleet) -> float:
    """Stores that engines announced beyond the blocks that became known by them."""
    copies = 0.0
    for worker in fleet.workers.values():
        copies += await fleet.metric(worker, "blocks_stored_total")
        copies -= await fleet.metric(worker, "published_blocks_total", "added")
    return copies


async def test_requests_go_where_their_blocks_are(asker: Asker, report: Report) -> None:
    """On an idle fleet every request of a prefix goes to the one instance that has it, exactly.

    A prompt of its own starts each of 10 groups; both instances get groups.
    """
    prompts = Prompts(1)
    groups = [prompts.blocks(4, beyond=0) for _ in range(10)]
    homes: dict[int, list[Asked]] = defaultdict(list)
    for _ in range(6):
        for number, prefix in enumerate(groups):
            homes[number].append(await asker.complete([*prefix, *prompts.ids(9)]))
    case = await report.judge("shared prefixes", asker.asked)
    assert [len(instances(asked)) for asked in homes.values()] == [1] * 10
    assert len(instances(asker.asked)) == 2
    assert case.exact == case.requests == 60
    assert case.hit_tokens == 10 * 5 * 4 * BLOCK


async def test_evictions(fleet: RealFleet, asker: Asker, report: Report) -> None:
    """Predictions hold while a working set of three times the fleet's blocks evicts all the time.

    Prompts repeat, the first ones often; longer ones extend shorter ones.
    """
    prompts = Prompts(2)
    stems = [prompts.blocks(4, beyond=0) for _ in range(40)]
    variants = [[*stem, *prompts.blocks(10)] for stem in stems]
    known = [*stems, *variants]
    before = [
        await fleet.metric(worker, "blocks_removed_total") for worker in fleet.workers.values()
    ]
    jobs = [partial(asker.complete, known[draw]) for draw in prompts.often(len(known), 150)]
    await at_once(jobs, concurrency=2)
    case = await report.judge("evictions", asker.asked)
    removed = [
        await fleet.metric(worker, "blocks_removed_total") for worker in fleet.workers.values()
    ]
    assert all(now - then > CAPACITY_BLOCKS for now, then in zip(removed, before, strict=True)), (
        removed
    )
    assert case.hit_tokens > 0


async def test_one_hash_stored_and_removed_twice(
    fleet: RealFleet, asker: Asker, report: Report
) -> None:
    """A prompt of whole blocks is stored again at each repeat, and stays until its last copy goes.

    The engine computes its last block anew every time; copies are evicted one by one.
    """
    prompts = Prompts(3)
    aligned = [prompts.blocks(3, beyond=0) for _ in range(4)]
    before = await second_copies(fleet)
    for _ in range(5):
        for prompt in aligned:
            await asker.complete(prompt)

    async def has_copies() -> bool:
        return await second_copies(fleet) - before >= 4 * 4

    await until(has_copies, "each repeat stored a block again")
    for number in range(40):  # push copies out while two of the prompts stay in use
        await asker.complete(prompts.blocks(6))
        await asker.complete(aligned[number % 2])
    for prompt in aligned:
        await asker.complete(prompt)
    await report.judge("repeated prompts", asker.asked)


async def test_cache_salts(asker: Asker, report: Report) -> None:
    """A salt is a cache of its own: nothing is shared across salts, everything within one."""
    prompts = Prompts(4)
    shared = [prompts.blocks(3) for _ in range(4)]
    rounds: dict[int, list[Asked]] = defaultdict(list)
    for number in range(3):
        for salt in ("tenant-a", "tenant-b", None):
            options = {} if salt is None else {"cache_salt": salt}
            for prompt in shared:
                rounds[number].append(await asker.complete(prompt, **options))
    await report.judge("cache salts", asker.asked)
    assert [one.actual_tokens for one in rounds[0]] == [0] * 12
    assert [one.actual_tokens for one in (*rounds[1], *rounds[2])] == [3 * BLOCK] * 24


async def test_adapters(asker: Asker, report: Report) -> None:
    """A LoRA adapter is a cache of its own, with and without a salt; so is the base model."""
    prompts = Prompts(5)
    shared = [prompts.blocks(3) for _ in range(3)]
    rounds: dict[int, list[Asked]] = defaultdict(list)
    roots: list[dict[str, Any]] = [{"model": name} for name in (NAME, *ADAPTERS)]
    roots.append({"model": ADAPTERS[0], "cache_salt": "tenant-a"})
    for number in range(3):
        for root in roots:
            for prompt in shared:
                rounds[number].append(await asker.complete(prompt, **root))
    await report.judge("adapters", asker.asked)
    assert [one.actual_tokens for one in rounds[0]] == [0] * 12
    assert [one.actual_tokens for one in (*rounds[1], *rounds[2])] == [3 * BLOCK] * 24


async def test_chats_of_many_turns(asker: Asker, report: Report) -> None:
    """Chats of 9 turns, four at a time: each turn finds its predecessor's prompt, as predicted."""
    prompts = Prompts(6)

    async def converse(number: int) -> list[Asked]:
        turns = []
        messages = [{"role": "system", "content": f"{number} " + prompts.words(30)}]
        for _ in range(9):
            messages.append({"role": "user", "content": prompts.words(16)})
            answer = await asker.chat(messages, max_tokens=12)
            messages.append({"role": "assistant", "content": answer.text})
            turns.append(answer)
        return turns

    chats = await at_once([partial(converse, number) for number in range(8)], concurrency=4)
    await report.judge("chats of 9 turns", asker.asked)
    hits = sum(turn.actual_tokens for chat in chats for turn in chat[1:])
    total = sum(len(turn.prompt_ids) for chat in chats for turn in chat[1:])
    assert hits > total / 2, f"{hits} of {total} prompt tokens were cached"


async def test_blocks_filled_while_decoding(asker: Asker, report: Report) -> None:
    """A prompt that goes on where an answer ended hits the blocks that the answer filled."""
    prompts = Prompts(7)
    for number in range(6):
        first = await asker.complete(prompts.ids(40 + number), max_tokens=100)
        longer = [*first.prompt_ids, *first.output_ids]
        again = await asker.complete([*longer, *prompts.ids(5)])
        assert again.actual_tokens >= (len(longer) - 1) // BLOCK * BLOCK >= 4 * BLOCK
        assert again.instance_id == first.instance_id
    await report.judge("decode-filled blocks", asker.asked)


async def test_many_at_once(asker: Asker, report: Report) -> None:
    """Twelve requests at a time with shared and own prefixes, streams and plain answers mixed.

    Blocks come and go between decision and admission; what that explains is no error.
    """
    prompts = Prompts(8)
    shared = [prompts.blocks(3, beyond=0) for _ in range(8)]
    jobs = [
        partial(asker.complete, [*shared[draw], *prompts.ids(20 + draw)], max_tokens=6)
        for draw in prompts.often(len(shared), 120)
    ]
    await at_once(jobs, concurrency=12)
    case = await report.judge("twelve at once", asker.asked)
    assert case.requests + case.degraded == 120
    assert case.hit_tokens > 60 * 3 * BLOCK
