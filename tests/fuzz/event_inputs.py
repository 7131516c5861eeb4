"""Payloads for the decoder: noise, random msgpack, real batches that went wrong; from a seed."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np

from indexer.engine.vllm_events import STORED_FIELDS, decode_batch
from indexer.errors import MalformedBatch

GOLDEN = Path(__file__).parent.parent / "golden"

TYPE_BYTES: Final = bytes(range(0xC0, 0xE0)) + b"\x80\x8f\x90\x9f\xa0\xbf\x00\x7f\xe0\xff"
"""First bytes of msgpack values, those with a length behind them among them."""

EXTREME_INTS: Final = (0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -(2**31), -(2**63))
DEPTHS: Final = (1, 3, 20, 200, 600, 1000, 1100)
"""Nesting: below and above what packing, unpacking and Python's own stack take."""

HUGE_ITEMS: Final = 5000
NAMES: Final = 12
"""Names of blocks in composed events: few, so that parents, duplicates and removals meet."""


def golden_payloads() -> list[bytes]:
    """Every batch recorded or made by hand in tests/golden."""
    texts: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            for one in value.values():
                collect(one)
        elif isinstance(value, list):
            for one in value:
                collect(one)

    for path in sorted(GOLDEN.glob("*.json")):
        collect(json.loads(path.read_text()))
    payloads = []
    for text in dict.fromkeys(texts):
        try:
            payload = bytes.fromhex(text)
            decode_batch(payload)
        except (ValueError, MalformedBatch):
            continue
        payloads.append(payload)
    assert payloads
    return payloads


class Inputs:
    """An endless stream of payloads; equal seeds give equal streams."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._numbers: list[int] = []
        self._golden = golden_payloads()
        self._kinds: list[Callable[[], bytes]] = [
            self._noise,
            self._random_batch,
            self._damaged,
            self._damaged,
            self._changed,
            self._changed,
            self._composed,
            self._composed,
            self._composed,
        ]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self._one_of(self._kinds)()

    # -- small choices ----------------------------------------------------------------------------

    def _below(self, n: int) -> int:
        if not self._numbers:  # one at a time is slow
            self._numbers = self._rng.integers(2**32, size=4096).tolist()
        return self._numbers.pop() % n

    def _one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self._below(len(choices))]

    def _chance(self, one_in: int) -> bool:
        return self._below(one_in) == 0

    # -- bytes ------------------------------------------------------------------------------------

    def _noise(self) -> bytes:
        return self._rng.bytes(self._below(64))

    def _damaged(self) -> bytes:
        """A real payload with some bytes changed, cut, doubled, or taken from another one."""
        payload = bytearray(self._one_of(self._golden))
        for _ in range(1 + self._below(4)):
            if not payload:
                break
            at, size = self._below(len(payload)), 1 + self._below(9)
            match self._below(6):
                case 0:
                    payload[at] ^= 1 << self._below(8)
                case 1:
                    payload[at] = self._one_of(TYPE_BYTES)
                case 2:
                    del payload[at:]
                case 3:
                    del payload[at : at + size]
                case 4:
                    payload[at:at] = payload[at : at + size]
                case _:
                    other = self._one_of(self._golden)
                    start = self._below(len(other))
                    payload[at : at + size] = other[start : start + size]
        return bytes(payload)

    # -- msgpack values ---------------------------------------------------------------------------

    def _value(self, depth: int = 3) -> Any:
        """Any msgpack value, nested so deep at most, apart from `Nested`."""
        below, one_of, noise = self._below, self._one_of, self._rng.bytes
        plain = (
            lambda: None,
            lambda: bool(below(2)),
            lambda: one_of(EXTREME_INTS),
            lambda: below(300) - 100,
            lambda: one_of((0.0, -1.5, float("nan"), float("inf"), 1e300)),
            lambda: noise(below(40)),
            lambda: one_of(("", "GPU", "ada", "BlockStored", "\u00e9" * 9, "x" * 999)),
            lambda: msgpack.ExtType(below(128), noise(below(20))),
            lambda: msgpack.Timestamp(below(2**32), below(10**9)),
        )
        nested = (
            lambda: [self._value(depth - 1) for _ in range(below(6))],
            lambda: {one_of(STORED_FIELDS): self._value(depth - 1) for _ in range(below(6))},
            lambda: [self._value(0)] * below(HUGE_ITEMS if self._chance(8) else 40),
            lambda: Nested(one_of(DEPTHS)),
        )
        return one_of((*plain, *nested) if depth else plain)()

    def _random_batch(self) -> bytes:
        return pack(
            self._one_of((self._value(5), [1.0, self._value(4), 0], [1.0, [self._value(4)]]))
        )

    def _changed(self) -> bytes:
        """A real batch with some of its values replaced, doubled, dropped or exchanged."""
        batch = msgpack.unpackb(self._one_of(self._golden), strict_map_key=False)
        for _ in range(1 + self._below(3)):
            places = [(batch, key) for key in keys_of(batch)]
            while places and not self._chance(4):  # towards the leaves
                holder, key = self._one_of(places)
                deeper = [(holder[key], inner) for inner in keys_of(holder[key])]
                if not deeper:
                    places = [(holder, key)]
                    break
                places = deeper
            if places:
                self._change(*self._one_of(places))
        return pack(batch)

    def _change(self, holder: Any, key: Any) -> None:
        match self._below(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case 2 if isinstance(holder, list):
                holder[key], holder[-1] = holder[-1], holder[key]
            case 3 if type(holder[key]) in (list, bytes, str):
                holder[key] = holder[key] * self._below(4)
            case _:
                holder[key] = self._value()

    def _composed(self) -> bytes:
        """Well-formed events about few blocks, in an order no engine would send."""
        return pack(
            [float(self._below(100)), [self._event() for _ in range(1 + self._below(6))], 0]
        )

    def _event(self) -> dict[str, Any]:
        names = [self._name() for _ in range(1 + self._below(4))]
        place = {"medium": self._one_of(("GPU", "GPU", "GPU", None, "CPU"))}
        place |= {"group_idx": 1 + self._below(2) if self._chance(40) else 0}
        if self._chance(200):
            return {"type": "AllBlocksCleared"}
        if self._chance(3):
            return {"type": "BlockRemoved", "block_hashes": names} | place
        block_size = self._one_of((16, 16, 16, 16, 32, 8, 5, 64))
        extra_keys = [self._one_of((None, None, ["s"], [["mm", 1]])) for _ in names]
        return place | {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None if self._chance(2) else self._name(),
            "token_ids": self._rng.integers(2, size=len(names) * block_size).tolist(),
            "block_size": block_size,
            "lora_id": self._one_of((None, None, None, 1)),
            "extra_keys": extra_keys if self._chance(4) else None,
            "kv_cache_spec_kind": "mamba" if self._chance(20) else "full_attention",
        }

    def _name(self) -> int | bytes:
        name = self._below(NAMES)
        return name if name < NAMES - 2 else name.to_bytes(8, "big")


class Nested:
    """A list in a list in a list; too deep to be made as one."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


def keys_of(value: Any) -> list[Any]:
    """Where values can be found inside of one."""
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def pack(value: Any) -> bytes:
    """Msgpack of a value, of one with `Nested` in it too."""
    packed: bytes = msgpack.packb(value, default=_stand_in)
    for depth in DEPTHS:
        packed = packed.replace(_STAND_INS[depth], b"\x91" * depth + b"\x01")
    return packed


def _stand_in(nested: Nested) -> msgpack.ExtType:
    return msgpack.ExtType(9, b"nested%10d" % nested.depth)


_STAND_INS: Final = {depth: msgpack.packb(_stand_in(Nested(depth))) for depth in DEPTHS}
