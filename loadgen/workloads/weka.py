"""Pure: agentic coding sessions recorded at WEKA (github.com/callanjfox/kv-cache-tester).

One line is one whole conversation: `id`, `block_size`, `hash_id_scope` ("local"), `tool_tokens`,
`system_tokens`, `requests`. A request: `t` (s from the conversation's start), `in`, `out` (tokens),
`hash_ids` (one per full block), `think_time`, `api_time` (s, may be missing). An item of type
"subagent" holds a nested list of requests whose `t` counts from the item's own `t`.

- There is no common clock: `session_rate` has to be chosen.
- Ids are local; here every session gets its own, save for the leading tool and system part: with
  `shared_prefix` the sessions whose tool part has the same length share it, and those whose system
  part has the same length too share that as well. Without, sessions share nothing.
- The tokens of a partly filled last block are unknown and count as unique.
- A sub-agent is a session of its own, begun by the main request before it; the main conversation
  does not wait for it (in the traces its next request mostly comes before the sub-agent's end).
- An answer of no tokens (27 of 34,094) counts as one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loadgen.trace_row import TraceRow
from loadgen.workloads.blocks import FreshIds
from loadgen.workloads.fields import (
    Fields,
    integer,
    number,
    objects,
    optional_number,
    text,
)
from loadgen.workloads.options import ReadOptions, SessionStarts

_LOCAL_ID_MAX = 1 << 40  # offsets of all sessions together stay below 2^63


@dataclass(slots=True)
class WekaReader:
    """One session, with its sub-agents, a line."""

    options: ReadOptions
    _ids: FreshIds = field(default_factory=FreshIds)
    _shared: dict[tuple[int, ...], int] = field(default_factory=dict)
    _starts: SessionStarts | None = None

    def rows(self, fields: Fields) -> list[TraceRow]:
        """The requests of one line, in the order of its items. Raises ValueError with a reason."""
        if fields.get("hash_id_scope") != "local":
            raise ValueError("hash_id_scope must be local")
        if self._starts is None:
            self._starts = SessionStarts.of(self.options)
        name = text(fields, "id")
        items = [_Item.of(item) for item in objects(fields, "requests")]
        main = [item for item in items if item.subagent is None]
        size = max(1, integer(fields, "block_size"))
        chain = _Chain(
            name=name,
            category="main",
            start_s=self._starts.next_s(),
            block_size_tokens=size,
            base=self._ids.take(1 + max((item.greatest_id for item in items), default=0)).start,
            lead=self._lead(fields, main, size),
            ids=self._ids,
        )
        rows: list[TraceRow] = []
        turn = 0
        for place, item in enumerate(items):
            parent_id = f"{name}/{turn - 1}" if turn else None
            if item.subagent is None:
                rows.append(chain.row(item, turn, parent_id, item.think_s))
                turn += 1
            else:
                launcher = main[turn - 1] if turn else None
                rows += self._subagent(chain, item, f"{name}/{place}", parent_id, launcher)
        return rows

    def finish(self) -> list[TraceRow]:
        """Nothing is held back."""
        return []

    def _subagent(
        self,
        main: "_Chain",
        item: "_Item",
        name: str,
        parent_id: str | None,
        launcher: "_Item | None",
    ) -> Iterator[TraceRow]:
        """The rows of one sub-agent; `launcher` is the main request before it, with its name."""
        requests = item.subagent or ()
        starts_s = number(item.fields, "t")
        chain = _Chain(
            name=name,
            category="subagent",
            start_s=main.start_s + starts_s,
            block_size_tokens=main.block_size_tokens,
            base=main.base,
            lead=self._lead(item.fields, requests, main.block_size_tokens),
            ids=main.ids,
        )
        think_s = None
        if launcher is not None:
            api_s = optional_number(launcher.fields, "api_time") or 0.0
            think_s = max(0.0, starts_s - number(launcher.fields, "t") - api_s)
        for turn, request in enumerate(requests):
            if turn > 0:
                parent_id = f"{name}/{turn - 1}"
                think_s = request.think_s
            yield chain.row(request, turn, parent_id, think_s)

    def _lead(self, sizes: Fields, requests: Sequence["_Item"], size: int) -> dict[int, int]:
        """Shared ids, by local id, of the tool and system part that the first request begins with.

        An id stands for the block and all before it, so it has one place in every request.
        """
        if not self.options.shared_prefix or not requests:
            return {}
        tool, system = integer(sizes, "tool_tokens"), integer(sizes, "system_tokens")
        lead: dict[int, int] = {}
        for place, local_id in enumerate(requests[0].head((tool + system) // size)):
            key = (tool, place) if (place + 1) * size <= tool else (tool, system, place)
            if key not in self._shared:
                self._shared[key] = self._ids.take(1).start
            lead[local_id] = self._shared[key]
        return lead


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """One growing prompt: the main conversation or a sub-agent."""

    name: str
    category: str
    start_s: float
    block_size_tokens: int
    base: int
    lead: dict[int, int]
    ids: FreshIds

    def row(
        self, request: "_Item", turn: int, parent_id: str | None, think_s: float | None
    ) -> TraceRow:
        fields = request.fields
        prompt_tokens = integer(fields, "in")
        full, rest = divmod(prompt_tokens, self.block_size_tokens)
        if len(request.local_ids) != full:
            raise ValueError(
                f"{prompt_tokens} prompt tokens fill {full} blocks of {self.block_size_tokens}, "
                f"but hash_ids has {len(request.local_ids)}"
            )
        block_ids = (request.local_ids + self.base).tolist()
        for place, local_id in enumerate(request.head(len(self.lead))):
            block_ids[place] = self.lead.get(local_id, block_ids[place])
        block_ids += self.ids.take(1 if rest else 0)
        return TraceRow(
            arrival_s=round(self.start_s + number(fields, "t"), 6),
            prompt_tokens=prompt_tokens,
            output_tokens=max(1, integer(fields, "out")),
            block_ids=tuple(block_ids),
            block_size_tokens=self.block_size_tokens,
            session_id=self.name,
            turn=turn,
            request_id=f"{self.name}/{turn}",
            parent_id=parent_id,
            category=self.category,
            think_s=think_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One request, or one sub-agent with its requests; ids are read once, there are millions."""

    fields: Fields
    local_ids: npt.NDArray[np.int64]
    subagent: "tuple[_Item, ...] | None" = None

    @classmethod
    def of(cls, fields: Fields) -> "_Item":
        if fields.get("type") == "subagent":
            requests = tuple(cls.of(request) for request in objects(fields, "requests"))
            return cls(fields=fields, local_ids=np.empty(0, np.int64), subagent=requests)
        values = fields.get("hash_ids")
        ids = np.array(values) if isinstance(values, list) else None
        if ids is None or ids.ndim != 1 or (len(ids) and ids.dtype != np.int64):
            raise ValueError("hash_ids must be a list of integers")
        if len(ids) and not (ids.min() >= 0 and ids.max() <= _LOCAL_ID_MAX):
            raise ValueError(f"hash_ids must hold integers from 0 to {_LOCAL_ID_MAX}")
        return cls(fields=fields, local_ids=ids.astype(np.int64))

    @property
    def greatest_id(self) -> int:
        if self.subagent is not None:
            return max((request.greatest_id for request in self.subagent), default=0)
        return int(self.local_ids.max(initial=0))

    @property
    def think_s(self) -> float | None:
        return optional_number(self.fields, "think_time")

    def head(self, count: int) -> list[int]:
        """The first local ids."""
        ids: list[int] = self.local_ids[:count].tolist()
        return ids
