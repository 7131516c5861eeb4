"""Token ids -> chained canonical block hashes.

    root = xxh3_64(schema version, model scope, adapter, cache salt, canonical block size)
    h_k  = xxh3_64(h_{k-1} || tokens of block k as little-endian u32 || extra keys of block k)

Only full blocks have a hash. An equal hash means an equal whole prefix under an equal root.
"""

import sys
from array import array
from collections.abc import Sequence

import msgpack
import numpy as np
import xxhash

from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES, SCHEMA_VERSION

TOKEN_BYTES = 4


def root(
    *, model_scope: str, block_size_tokens: int, adapter: str | None = None, salt: str | None = None
) -> BlockHash:
    """Start value of a chain; another root is a disjoint cache.

    Args:
        model_scope: primary served model name; aliases share it.
        block_size_tokens: canonical block size of the fleet.
        adapter: LoRA adapter name, None for the base model.
        salt: the request's `cache_salt`, None when it has none.
    """
    parts = [SCHEMA_VERSION, model_scope, adapter, salt, block_size_tokens]
    return BlockHash(xxhash.xxh3_64_digest(msgpack.packb(parts)))


def approximate_root(
    *, model_scope: str, block_size_tokens: int, adapter: str | None = None, salt: str | None = None
) -> BlockHash:
    """Start value of a chain over text where token ids are not to be had; see `root`.

    No token chain begins with it: what is hashed has one element more, and another first one.
    """
    parts = ["text", SCHEMA_VERSION, model_scope, adapter, salt, block_size_tokens]
    return BlockHash(xxhash.xxh3_64_digest(msgpack.packb(parts)))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, 4 bytes each.

    Raises:
        OverflowError: a token id is negative or does not fit 32 bits.
    """
    packed = array("I", token_ids)
    assert packed.itemsize == TOKEN_BYTES, packed.itemsize
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def step(parent: BlockHash, block: bytes, extra: bytes = b"") -> BlockHash:
    """Hash of one block from its parent's hash, its packed tokens and its encoded extra keys."""
    return BlockHash(xxhash.xxh3_64_digest(parent + block + extra))


def chain(root_hash: BlockHash, packed_tokens: bytes, block_size_tokens: int) -> bytes:
    """Hashes of all full blocks of a prompt, concatenated: 8 bytes each, root's child first.

    Args:
        root_hash: from `root`, or the hash of the block before the first token.
        packed_tokens: from `pack_tokens`; a partial last block is ignored.
        block_size_tokens: canonical block size.
    """
    stride = block_size_tokens * TOKEN_BYTES
    digest = xxhash.xxh3_64_digest
    parent: bytes = root_hash
    out = []
    for start in range(0, len(packed_tokens) - stride + 1, stride):
        parent = digest(parent + packed_tokens[start : start + stride])
        out.append(parent)
    return b"".join(out)


TIER_MARK = 0xA5C3_9E17_64D2_8BF1
"""Any number would do: it tells blocks in a tier from the same blocks on a device."""


def tier_name(block: BlockHash) -> BlockHash:
    """Under which a block is published that an instance can load from a tier of KV$."""
    named = int.from_bytes(block, "little") ^ TIER_MARK
    return BlockHash(named.to_bytes(BLOCK_HASH_BYTES, "little"))


def tier_chain(hashes: bytes) -> bytes:
    """`tier_name` of every block of a chain."""
    return (np.frombuffer(hashes, "<u8") ^ np.uint64(TIER_MARK)).tobytes()


def split(hashes: bytes) -> list[BlockHash]:
    """Concatenated hashes as a list."""
    assert len(hashes) % BLOCK_HASH_BYTES == 0, len(hashes)
    return [
        BlockHash(hashes[i : i + BLOCK_HASH_BYTES]) for i in range(0, len(hashes), BLOCK_HASH_BYTES)
    ]


def encode_extra_keys(keys: Sequence[object]) -> bytes:
    """Extra keys of a block (multimodal identity and offset, prompt-embedding digest) as bytes.

    Adapter and cache salt are not among them: they belong to the root.
    """
    return bytes(msgpack.packb(list(keys), default=repr)) if keys else b""
