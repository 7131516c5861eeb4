"""Feeds the decoder, and the table behind it, with what no engine should send.

    python tests/fuzz/decoder_fuzz.py --inputs 1000000 [--seed 1]

Laws: a payload is a batch or MalformedBatch, nothing else; every event of it is decoded or counted;
no event stops the table; what the table publishes is closed, and made of nothing but stores that it
was given. A failure names the seed and the number of the input.
"""

import argparse
import secrets
import sys
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from fuzz.event_inputs import Inputs

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash, EngineBlockHash
from indexer.engine.vllm_events import DEVICE_MEDIUM, Batch, BlockStored, decode_batch
from indexer.errors import MalformedBatch
from indexer.table.block_table import BlockTable

INPUTS_PER_TABLE = 20
STATES_MAX = 16
"""Contents a name may have been given before what its table publishes is not compared any more."""

State = tuple[BlockHash, bytes, bytes]
"""Where a chain stands: canonical hash, tokens behind it, extra keys of the blocks they are in."""


@dataclass
class Derivable:
    """Every canonical hash that the stores given so far can make, in any order.

    Attributes:
        states: name -> where the chain may stand behind it -> the extra keys as they are.
        parents: canonical hash -> what may stand before it: a root is nobody's child.
        is_complete: whether names and contents were few enough to follow all.
    """

    fleet_tokens: int
    stores: list[BlockStored] = field(default_factory=list)
    states: dict[EngineBlockHash, dict[State, tuple[object, ...]]] = field(default_factory=dict)
    parents: dict[BlockHash, BlockHash] = field(default_factory=dict)
    is_complete: bool = True

    def derive(self) -> None:
        """Follow the stores again and again, until nothing new comes out."""
        grows = True
        while grows and self.is_complete:
            grows = False
            for event in self.stores:
                grows = self._follow(event) or grows

    def _follow(self, event: BlockStored) -> bool:
        """Whether a store makes something new of what is known by now."""
        if event.parent is None:
            root = block_hash.root(
                model_scope="m",
                block_size_tokens=self.fleet_tokens,
                adapter=event.adapter,
                salt=event.salt,
            )
            before: dict[State, tuple[object, ...]] = {(root, b"", b""): ()}
        else:
            before = self.states.setdefault(event.parent, {})
        size, grows = 4 * event.block_size_tokens, False
        for n, name in enumerate(event.hashes):
            extra_keys = event.extra_keys[n] if event.extra_keys else ()
            tokens = event.tokens[n * size : (n + 1) * size]
            behind = self.states.setdefault(name, {})
            for (before_last, left, _), earlier_keys in list(before.items()):
                last, rest, keys = self._step(before_last, left + tokens, earlier_keys, extra_keys)
                state = last, rest, block_hash.encode_extra_keys(keys)
                grows = grows or state not in behind
                behind[state] = keys
            self.is_complete = self.is_complete and len(behind) <= STATES_MAX
            before = behind
        return grows

    def _step(
        self,
        last: BlockHash,
        tokens: bytes,
        earlier_keys: tuple[object, ...],
        own_keys: tuple[object, ...],
    ) -> tuple[BlockHash, bytes, tuple[object, ...]]:
        """Behind one more block: a canonical block takes the keys of all blocks it touches."""
        stride, keys = 4 * self.fleet_tokens, earlier_keys + own_keys
        while len(tokens) >= stride:
            own = block_hash.step(last, tokens[:stride], block_hash.encode_extra_keys(keys))
            self.parents[own] = last
            last, tokens, keys = own, tokens[stride:], own_keys
        return last, tokens, keys if tokens else ()


class Session:
    """One table, and what it was given."""

    def __init__(self, number: int) -> None:
        self._fleet_tokens = (16, 16, 32, 64)[number % 4]
        self._table = BlockTable(model_scope="m", block_size_tokens=self._fleet_tokens)
        self._derivable = Derivable(self._fleet_tokens)

    def feed(self, batch: Batch) -> None:
        """Apply a batch."""
        for event in batch.events:
            self._table.apply(event)
            if isinstance(event, BlockStored) and event.tokens and event.medium == DEVICE_MEDIUM:
                self._derivable.stores.append(event)

    def end(self) -> int:
        """Check what is published, also after everything else a table can do; returns how much."""
        self._derivable.derive()
        count = self._check()
        self._table.trim(count // 2)
        self._check()
        dump = msgpack.unpackb(msgpack.packb(self._table.dump()), strict_map_key=False)
        self._table = BlockTable.load(dump, model_scope="m", block_size_tokens=self._fleet_tokens)
        self._table.readmit(1 << 30)
        assert self._check() == count
        self._table.doubt()
        assert self._check() == 0
        return count

    def _check(self) -> int:
        """Closed, and derived from stores."""
        published = self._table.published()
        parents = self._derivable.parents
        if self._derivable.is_complete:
            for block in published:
                before = parents[block]
                assert before not in parents or before in published, block
        return len(published)


@dataclass
class Totals:
    """What became of the inputs."""

    malformed_batches: int = 0
    events: int = 0
    malformed_events: int = 0
    unknown_events: int = 0
    published: int = 0


def run(inputs_count: int, seed: int) -> Totals:
    """Feed that many inputs; raises whatever a law's breach raises, with the input in a note."""
    totals = Totals()
    session = Session(0)
    number = 0
    payload = b""
    try:
        for number, payload in enumerate(islice(Inputs(seed), inputs_count), 1):
            batch = decode(payload, totals)
            if batch is not None:
                session.feed(batch)
            if number % INPUTS_PER_TABLE == 0 or number == inputs_count:
                totals.published += session.end()
                session = Session(number // INPUTS_PER_TABLE)
    except Exception as error:
        error.add_note(f"seed {seed}, input {number}: {payload[:2000].hex()}")
        raise
    return totals


def decode(payload: bytes, totals: Totals) -> Batch | None:
    """A batch all of whose events are decoded or counted; None when it is malformed."""
    try:
        batch = decode_batch(payload)
    except MalformedBatch:
        totals.malformed_batches += 1
        return None
    raw = msgpack.unpackb(payload, strict_map_key=False)
    raw_events = raw["events"] if isinstance(raw, dict) else raw[1]
    decoded_count = len(batch.events)
    assert decoded_count + batch.malformed_count + batch.unknown_count == len(raw_events)
    totals.events += decoded_count
    totals.malformed_events += batch.malformed_count
    totals.unknown_events += batch.unknown_count
    return batch


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    started_s = time.monotonic()
    totals = run(options.inputs, options.seed)
    print(f"{options.inputs} inputs in {time.monotonic() - started_s:.0f} s: {totals}")


if __name__ == "__main__":
    main()
