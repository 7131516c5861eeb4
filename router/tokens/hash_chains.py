"""Block hashes of prompts, hashing only what no earlier prompt began with.

A chain's next hashes are a function of the hash before them and the tokens that follow, so runs of
blocks are remembered under exactly that.
"""

import threading
from collections import OrderedDict
from typing import Final

from indexer.contract import block_hash
from indexer.contract.block_hash import TOKEN_BYTES
from indexer.contract.identifiers import BlockHash
from indexer.contract.limits import BLOCK_HASH_BYTES, BLOCKS_PER_LOOKUP_MAX
from router.index.known_fleets import ServedModel
from router.requests.api_call import ApiCall

RUN_TOKENS: Final = 1024
"""Tokens of a run, about: looking one up costs as much as hashing ten blocks of 16 tokens."""

ENTRY_BYTES: Final = 320
"""What an entry takes beside its tokens and hashes."""

CHAINS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Runs of 12 million tokens in blocks of 16."""


class HashChains:
    """`block_hash.chain` that remembers. Safe in several threads.

    Args:
        bytes_max: tokens, hashes and what holds them together; the least recently used go first.
    """

    def __init__(self, bytes_max: int = CHAINS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._runs: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Held now."""
        return self._bytes

    def of(self, packed: bytes, served: ServedModel, call: ApiCall) -> bytes:
        """Hashes of a prompt's full blocks; none of one that does not reuse what is there.

        Args:
            packed: token ids; empty when they are unknown.
            served: with model scope, adapter and block size.
            call: with the cache salt.
        """
        if not packed or not call.reads_prefixes:
            return b""
        fleet = served.fleet
        root = block_hash.root(
            model_scope=fleet.model_scope,
            block_size_tokens=fleet.block_size_tokens,
            adapter=served.adapter,
            salt=call.cache_salt,
        )
        bytes_max = BLOCKS_PER_LOOKUP_MAX * fleet.block_size_tokens * TOKEN_BYTES
        return self.chain(root, packed[:bytes_max], fleet.block_size_tokens)

    def chain(self, root: BlockHash, packed: bytes, block_size_tokens: int) -> bytes:
        """See `block_hash.chain`."""
        stride = max(1, RUN_TOKENS // block_size_tokens) * block_size_tokens * TOKEN_BYTES
        whole = len(packed) - len(packed) % stride
        parent, out = root, []
        for start in range(0, whole, stride):
            key = (parent, packed[start : start + stride])
            hashes = self._get(key)
            if hashes is None:
                hashes = block_hash.chain(*key, block_size_tokens)
                self._put(key, hashes)
            out.append(hashes)
            parent = BlockHash(hashes[-BLOCK_HASH_BYTES:])
        out.append(block_hash.chain(parent, packed[whole:], block_size_tokens))
        return b"".join(out)

    def _get(self, key: tuple[BlockHash, bytes]) -> bytes | None:
        with self._lock:
            hashes = self._runs.get(key)
            if hashes is not None:
                self._runs.move_to_end(key)
        return hashes

    def _put(self, key: tuple[BlockHash, bytes], hashes: bytes) -> None:
        with self._lock:
            if key not in self._runs:
                self._runs[key] = hashes
                self._bytes += _size(key, hashes)
            while self._bytes > self._bytes_max:
                self._bytes -= _size(*self._runs.popitem(last=False))


def _size(key: tuple[bytes, bytes], hashes: bytes) -> int:
    return len(key[1]) + len(hashes) + ENTRY_BYTES
