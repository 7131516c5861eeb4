"""The index functions on a real server answer as their Python twins do."""

from dataclasses import replace

import numpy as np
from builders import make_fleet_record
from contract.embedded_server import EmbeddedServer
from contract.reference import ReferenceIndex
from hypothesis import given
from hypothesis import strategies as st

from indexer.contract import block_hash, index_functions, keys
from indexer.contract.identifiers import BlockHash, SlotIndex

SLOTS = 256
FLEET = make_fleet_record(bucket_bits=6)
ROOT = block_hash.root(model_scope="m", block_size_tokens=16)


def chain(path: list[int]) -> list[BlockHash]:
    """Block hashes of a prompt whose block k is filled with token path[k]."""
    packed = block_hash.pack_tokens([token for token in path for _ in range(16)])
    return block_hash.split(block_hash.chain(ROOT, packed, 16))


def depths(server: EmbeddedServer, hashes: list[BlockHash]) -> list[int]:
    """The lookup's answer as leading blocks per slot."""
    out = np.zeros(SLOTS, np.int64)
    call = index_functions.lookup(FLEET, 0, b"".join(hashes))
    index_functions.depths(server.call(call), out)
    return out.tolist()


@given(
    held=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 90))),
    n=st.integers(1, 90),
)
def test_lookups_answers_as_a_lookup_of_each_partition(
    server: EmbeddedServer, held: list[tuple[int, int, int]], n: int
) -> None:
    """What is worked out once for all partitions mixes nothing up between them."""
    server.clear()
    fleet, hashes = replace(FLEET, partitions=4), chain(list(range(90)))
    for partition, local, depth in held:
        slot = SlotIndex(partition * SLOTS + local)
        server.call(index_functions.open_slot(fleet, slot, 1))
        server.call(index_functions.store(fleet, slot, 1, hashes[:depth]))
    asked = b"".join(hashes[:n])
    (call,) = index_functions.lookups(fleet, asked, together=True)
    each = index_functions.lookups(fleet, asked, together=False)
    assert server.call(call) == [server.call(one) for one in each]


# A prompt shares a prefix of a few alternatives with others, so chains part at many depths.
paths = st.lists(st.integers(0, 2), min_size=1, max_size=40)
holdings = st.lists(st.tuples(st.integers(0, SLOTS - 1), paths), max_size=60)
crowds = st.tuples(st.integers(0, 200), st.integers(25, 50), paths)


@given(holdings=holdings, crowds=st.lists(crowds, max_size=2), taken=holdings, prompt=paths)
def test_lookup_equals_the_linear_walk(
    server: EmbeddedServer, holdings, crowds, taken, prompt
) -> None:
    """Galloping and bisecting gives the depth that walking block by block gives, for every slot."""
    server.clear()
    reference = ReferenceIndex()
    for first, count, path in crowds:  # enough holders of one block for the bitmap form
        holdings = holdings + [(slot, path) for slot in range(first, first + count)]
    for slot, _ in holdings:
        server.call(index_functions.open_slot(FLEET, slot, 1))
    for slot, path in holdings:
        hashes = chain(path)
        call = index_functions.store(FLEET, SlotIndex(slot), 1, hashes)
        assert server.call(call) == 1
        reference.store(slot, hashes)
    for slot, path in taken:
        # A sidecar removes children before parents and never leaves a hole.
        below = [h for h in sorted(reference.holders) if slot in reference.holders[h]]
        gone = [h for h in chain(path)[len(path) // 2 :] if h in below]
        prefixes = {tuple(chain(p)[: len(p)]) for s, p in holdings if s == slot}
        gone += [h for c in prefixes for i, h in enumerate(c) if set(c[:i]) & set(gone)]
        call = index_functions.remove(
            FLEET, SlotIndex(slot), 1, list(dict.fromkeys(reversed(gone)))
        )
        server.call(call)
        reference.remove(slot, gone)

    for path in [prompt, *(p for _, p in holdings[:5])]:
        hashes = chain(path)
        assert depths(server, hashes) == reference.depths(hashes, SLOTS)


def test_one_holder_more_than_a_list_holds_and_back(server: EmbeddedServer) -> None:
    """Holders survive the change from list to bitmap and back."""
    server.clear()
    hashes = chain([1, 2, 3])
    for slot in range(33):
        server.call(index_functions.open_slot(FLEET, slot, 1))
        server.call(index_functions.store(FLEET, slot, 1, hashes))
    assert depths(server, hashes)[:34] == [3] * 33 + [0]

    for slot in range(2, 33):
        server.call(index_functions.remove(FLEET, slot, 1, hashes[::-1]))

    assert depths(server, hashes)[:4] == [3, 3, 0, 0]
    # Two holders are two bytes again, whichever way they came to be two.
    buckets = [
        keys.bucket(index_functions.anchor(FLEET, 0), i) for i in range(2**FLEET.bucket_bits)
    ]
    assert {b"\x00\x01"} == {value for key in buckets for value in server.redis.hvals(key)}


def test_an_older_generation_cannot_write(server: EmbeddedServer) -> None:
    """A sidecar that lost its slot changes nothing of the slot's next user."""
    server.clear()
    hashes = chain([1, 2])
    assert server.call(index_functions.open_slot(FLEET, 3, 2)) == 1
    assert server.call(index_functions.open_slot(FLEET, 3, 1)) == 0
    assert server.call(index_functions.store(FLEET, 3, 1, hashes)) == 0
    assert server.call(index_functions.store(FLEET, 3, 2, hashes)) == 1
    assert server.call(index_functions.remove(FLEET, 3, 1, hashes)) == 0
    assert depths(server, hashes)[3] == 2


@given(paths=st.lists(st.tuples(st.sampled_from([1, 2, 40]), paths), min_size=1, max_size=30))
def test_a_sweep_leaves_nothing_of_its_slot(server: EmbeddedServer, paths) -> None:
    """After a sweep the slot holds nothing, the others hold what they held, and it cannot write."""
    server.clear()
    reference = ReferenceIndex()
    for slot in (1, 2, 40):
        server.call(index_functions.open_slot(FLEET, slot, 1))
    for slot, path in paths:
        server.call(index_functions.store(FLEET, slot, 1, chain(path)))
        reference.store(slot, chain(path))
    held = sum(2 in holders for holders in reference.holders.values())

    taken = sum(
        server.call(index_functions.sweep(FLEET, 2, 1, first, 16))
        for first in range(0, 2**FLEET.bucket_bits, 16)
    )

    reference.remove(2, list(reference.holders))
    assert taken == held
    for _, path in paths:
        assert depths(server, chain(path)) == reference.depths(chain(path), SLOTS)
    assert server.call(index_functions.store(FLEET, 2, 1, chain([1]))) == 0


def test_a_late_sweep_spares_the_next_generation(server: EmbeddedServer) -> None:
    """A sweep for an earlier user of the slot changes nothing of the present one's blocks."""
    server.clear()
    hashes = chain([1, 2])
    server.call(index_functions.open_slot(FLEET, SlotIndex(3), 2))
    server.call(index_functions.store(FLEET, SlotIndex(3), 2, hashes))

    late = index_functions.sweep(FLEET, SlotIndex(3), 1, 0, 2**FLEET.bucket_bits)

    assert server.call(late) == -1
    assert depths(server, hashes)[3] == 2
    assert server.call(index_functions.store(FLEET, SlotIndex(3), 2, hashes)) == 1
