"""The simulated engine over block identities, in spans of steps. Pure: no clock, no I/O.

It schedules as `workers.simulated.engine.Engine` does and gives the same admissions, hits, first
tokens, ends, preemptions, stored and evicted blocks in the same order at the same times; a property
test holds the two against each other. It is faster for two reasons. A request's blocks are handled
as arrays. And where every request decodes and no waiting one can be admitted, all steps up to the
first end (or up to the step that lacks a free block) are one span.

A caller alternates `start` and `finish`, the latter when `ends_s` has come. `add` may come between:
it cuts the span at the end of the step in progress if the request could be admitted there, so
`ends_s` may then be earlier. A request that comes at the very end of a step joins the step that
begins there.

Two facts of the schedule carry the bookkeeping. A batch is never larger than the token budget, as
each admission leaves each member at least one token. So decoding requests never starve; and at most
one member, always the youngest, has more prompt left than a step's budget allowed: the tail.
"""

from collections import deque

import numpy as np

from workers.simulated.engine import EngineConfig, RequestTooLongError
from workers.simulated.fast.block_columns import BlockColumns, Identities
from workers.simulated.fast.decoders import Decoders
from workers.simulated.fast.free_order import FreeOrder, LeastRecentlyFreed
from workers.simulated.fast.growth import extend, take_turn, take_turns
from workers.simulated.fast.request import ActiveChain, ChainRequest
from workers.simulated.fast.span import (
    BlockChanges,
    ChainAdmission,
    Reached,
    Span,
    decode_ends_s,
    mixed_step_s,
)
from workers.simulated.fast.tier import TierColumns
from workers.simulated.step import EngineTotals


class SpanEngine:
    """One simulated instance.

    Attributes:
        config: its limits; `output_ids` is not used.
        totals: counters, as of the last finished span.
        pool: its blocks, as of the steps that `changes` or `finish` has seen the end of.
    """

    def __init__(
        self,
        config: EngineConfig,
        order: FreeOrder | None = None,
        tier: TierColumns | None = None,
    ) -> None:
        """An empty engine that evicts in this order; None: least recently freed first.

        Engines that are given one tier share it.
        """
        self.config = config
        self.tier = tier
        self.totals = EngineTotals()
        blocks = config.capacity_blocks
        self._demotes = tier is not None and tier.config.takes_evicted
        self.pool = BlockColumns(
            blocks,
            LeastRecentlyFreed(blocks) if order is None else order,
            tier.demote if tier is not None and self._demotes else None,
        )
        self._waiting: deque[ActiveChain] = deque()
        self._decoders = Decoders(config.block_size_tokens)
        self._tail: ActiveChain | None = None  # its prompt is computed in part
        self._span: Span | None = None
        self._changes: deque[BlockChanges] = deque()
        self._next_rank = 0
        self._head_hit_blocks = 0  # of the first waiting request, when blocks were last too few

    @property
    def ends_s(self) -> float | None:
        """When the span in progress ends; None: nothing is in progress."""
        return self._span.end_s if self._span else None

    @property
    def running_count(self) -> int:
        """Requests in the batch."""
        others = len(self._span.batch) if self._span else int(self._tail is not None)
        return len(self._decoders) + others

    @property
    def waiting_count(self) -> int:
        """Requests queued, preempted ones included."""
        return len(self._waiting)

    def busy_s(self, now_s: float) -> float:
        """Time of all steps that have begun by now."""
        span = self._span
        if span is None:
            return self.totals.busy_s
        begun = min(span.steps_until(now_s), span.steps - 1)
        return self.totals.busy_s + float(span.ends_s[begun]) - span.start_s

    def add(self, request: ChainRequest, now_s: float) -> None:
        """Queue a request.

        Raises:
            RequestTooLongError: it could not finish even alone.
        """
        assert min(request.prompt_tokens, request.output_tokens) >= 1, request.request_id
        block_size = self.config.block_size_tokens
        assert len(request.blocks) == request.held_tokens // block_size, request.request_id
        if request.held_tokens > self.config.capacity_blocks * block_size:
            raise RequestTooLongError(
                f"{request.held_tokens} tokens do not fit {self.config.capacity_blocks} blocks of "
                f"{block_size} tokens"
            )
        if len(request.blocks):
            identities_count = int(request.blocks.max()) + 1
            self.pool.learn(identities_count)
            if self.tier is not None:
                self.tier.learn(identities_count)
        # Behind another one that waits, or before a full batch, it changes nothing now.
        if self._span and not self._waiting and self._has_room():
            self._span.cut(now_s)
        self._waiting.append(ActiveChain(request))

    def start(self, now_s: float) -> Span | None:
        """Schedule the next span; None when there is nothing to compute."""
        assert self._span is None, "a span is in progress"
        decoders = self._decoders
        if not (len(decoders) or self._tail or self._waiting):
            return None
        steps = 0
        if len(decoders) and self._tail is None and not (self._waiting and self._has_room()):
            steps = decoders.steps_within(0, decoders.steps_to_end, self._span_blocks())
        self._span = self._decode_span(now_s, steps) if steps else self._step(now_s)
        return self._span

    def finish(self) -> list[Reached]:
        """The span's time has come: first and last tokens in order; frees what has finished."""
        span = self._span
        assert span is not None, "no span is in progress"
        self._apply(span, span.steps)
        self._span = None
        decoders = self._decoders
        decoders.steps += span.steps
        self.totals.generated_tokens += span.steps * len(decoders)
        self.totals.busy_s += span.end_s - span.start_s
        reached = []
        for active in decoders.pop_ended():
            reached.append(Reached(active.request, first=False, last=True))
            self._release(active, span.end_s)
        self._tail = None
        for active, count in span.batch:
            active.computed_tokens += count
            if active.computed_tokens < active.token_count:
                self._tail = active
                continue
            request = active.request
            first = active.token_count == request.prompt_tokens
            active.token_count += 1
            last = active.generated_tokens == request.output_tokens
            self.totals.generated_tokens += 1
            if first:
                self.totals.prompt_tokens += request.prompt_tokens
                if self.tier is not None and not self._demotes:
                    full = request.prompt_tokens // self.config.block_size_tokens
                    self.tier.write(request.blocks[:full])
            if first or last:
                reached.append(Reached(request, first=first, last=last))
            if last:
                self._release(active, span.end_s)
            else:
                decoders.join(active)
        return reached

    def _release(self, active: ActiveChain, now_s: float) -> None:
        """It has ended."""
        self.pool.order.advance(now_s)
        self.pool.release(active.take_chain())

    def changes(self, now_s: float) -> list[BlockChanges]:
        """Blocks stored and evicted by the steps that have ended by then, since the last call.

        An index that hears of them late may ask for a moment that has passed.
        """
        if self._span:
            self._apply(self._span, self._span.steps_until(now_s))
        told = []
        while self._changes and self._changes[0].at_s[0] <= now_s:
            change = self._changes.popleft()
            if change.at_s[-1] > now_s:
                count = int(change.at_s.searchsorted(now_s, side="right"))
                self._changes.appendleft(BlockChanges(change.at_s[count:], change.signed[count:]))
                change = BlockChanges(change.at_s[:count], change.signed[:count])
            told.append(change)
        return told

    # -- scheduling -------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """A request more would find a place and at least one token of the budget."""
        config = self.config
        return len(self._decoders) < min(config.max_num_seqs, config.max_num_batched_tokens)

    def _decode_span(
        self, now_s: float, steps: int, changes: list[Identities] | None = None
    ) -> Span:
        """Everybody decodes for so many steps; with changes the first one is applied already."""
        decoders = self._decoders
        return Span(
            start_s=now_s,
            ends_s=decode_ends_s(
                self.config.cost,
                now_s,
                requests=len(decoders),
                context_tokens=decoders.context_tokens,
                steps=steps,
            ),
            steps=steps,
            applied_steps=0 if changes is None else 1,
            admissions=[],
            batch=[],
            changes=changes or [],
        )

    def _step(self, now_s: float) -> Span:
        """A step of its own; if nobody is preempted, admitted or prefilled, what follows too."""
        decoders = self._decoders
        changes: list[Identities] = []
        batch: list[tuple[ActiveChain, int]] = []
        preempted = self._schedule_decoders(changes)
        budget = self.config.max_num_batched_tokens - len(decoders)
        if self._tail is not None:
            budget, tail_preempted = self._schedule_tail(self._tail, budget, batch, changes)
            preempted = preempted or tail_preempted
        admissions: list[ChainAdmission] = []
        load_s = 0.0
        if not preempted:
            admissions, load_s = self._schedule_waiting(now_s, budget, batch, changes)
        if not batch:
            steps = 1 if preempted or self._head_may_hit_more() else self._steps_from_second()
            return self._decode_span(now_s, steps, changes)
        end_s = now_s + (mixed_step_s(self.config.cost, decoders, batch) + load_s)
        return Span(
            start_s=now_s,
            ends_s=np.array([end_s]),
            steps=1,
            applied_steps=1,
            admissions=admissions,
            batch=batch,
            changes=changes,
        )

    def _steps_from_second(self) -> int:
        """Steps of a span whose first step has its blocks and whose waiting requests must wait.

        They still must in the following ones: while everybody decodes, free blocks only get fewer,
        and what the first of them would hit grows by one block at most for each one evicted.
        """
        decoders = self._decoders
        return 1 + decoders.steps_within(1, decoders.steps_to_end, self._span_blocks())

    def _span_blocks(self) -> int:
        """Blocks that steps of a span may take.

        None where what is evicted goes to a tier: other engines see it from the step on that takes
        the block, so that step is one of its own.
        """
        return 0 if self._demotes else self.pool.free_count

    def _head_may_hit_more(self) -> bool:
        """A decoding request may yet store the next block that the first waiting one lacks."""
        if not self._waiting or not self._has_room():
            return False
        head, place = self._waiting[0], self._head_hit_blocks
        if place >= (head.token_count - 1) // self.config.block_size_tokens:
            return False
        identity = head.request.blocks[place]
        return any(
            place - (chain := active.request.blocks).size + len(active.unstored) >= 0
            and place < chain.size
            and chain[place] == identity
            for active in self._decoders
        )

    def _schedule_decoders(self, changes: list[Identities]) -> bool:
        """Blocks for one step of the decoding requests; True: somebody was preempted."""
        decoders, pool = self._decoders, self.pool
        if not len(decoders):
            return False
        if decoders.blocks_needed(0, 1) <= pool.free_count:
            signed, _ = take_turns(pool, decoders, 0, 1)
            changes.append(np.array(signed, np.int64))
            return False
        signed = []
        for _, fills, active in list(decoders.turns(0, 1)):
            if active in decoders and not fills:
                while not pool.free_count and active in decoders:
                    self._preempt(self._tail or decoders.pop_youngest())
            if active not in decoders:
                break  # it was the youngest itself
            signed += take_turn(pool, active, fills=fills)
        changes.append(np.array(signed, np.int64))
        return True

    def _schedule_tail(
        self,
        active: ActiveChain,
        budget: int,
        batch: list[tuple[ActiveChain, int]],
        changes: list[Identities],
    ) -> tuple[int, bool]:
        """The next chunk of a prompt; returns the rest of the budget and "preempted"."""
        count = min(active.token_count - active.computed_tokens, budget)
        end = active.computed_tokens + count
        block_size = self.config.block_size_tokens
        if -(-end // block_size) - active.held_count > self.pool.free_count:
            self._preempt(active)
            return budget, True
        extend(self.pool, active, end, block_size, changes)
        batch.append((active, count))
        return budget - count, False

    def _schedule_waiting(
        self,
        now_s: float,
        budget: int,
        batch: list[tuple[ActiveChain, int]],
        changes: list[Identities],
    ) -> tuple[list[ChainAdmission], float]:
        """Admit waiting requests in order while budget, sequence limit and blocks allow.

        Returns:
            those admitted for the first time, and how long all that were admitted load, in seconds.
        """
        config, pool, tier, waiting = self.config, self.pool, self.tier, self._waiting
        block_size = config.block_size_tokens
        places = config.max_num_seqs - len(self._decoders) - len(batch)
        admissions: list[ChainAdmission] = []
        load_s = 0.0
        while waiting and budget and places > 0:
            active = waiting[0]
            # The last token is always recomputed: its logits are needed.
            usable = active.request.blocks[: (active.token_count - 1) // block_size]
            hit = pool.match(usable)
            idle = pool.idle(hit)
            lacking = -(-active.token_count // block_size) - len(hit)
            if lacking + len(idle) > pool.free_count:
                self._head_hit_blocks = len(hit)
                break
            waiting.popleft()
            active.rank = self._next_rank
            self._next_rank += 1
            pool.order.advance(now_s)
            pool.order.begin(active.request.request_id)
            pool.hold(hit, idle, active.request.category)
            active.begin(hit, len(hit) + lacking)
            loaded = 0 if tier is None else tier.match(usable[len(hit) :])
            if tier is not None and loaded:
                load_s += tier.config.load_s(loaded * block_size)
            start = active.computed_tokens = (len(hit) + loaded) * block_size
            count = min(active.token_count - start, budget)
            extend(pool, active, start + count, block_size, changes)
            if active.hit_tokens is None:
                active.hit_tokens = len(hit) * block_size
                admission = ChainAdmission(active.request, active.hit_tokens, loaded * block_size)
                self.totals.count(active.token_count, *admission[1:])
                admissions.append(admission)
            batch.append((active, count))
            budget -= count
            places -= 1
        self.totals.tier_load_s += load_s
        return admissions, load_s

    def _preempt(self, active: ActiveChain) -> None:
        """The youngest, already out of the decoding ones, gives its blocks back and waits."""
        if active is self._tail:
            self._tail = None
        self.pool.release(active.take_chain())
        self.totals.preemption_count += 1
        self._waiting.appendleft(active)

    def _apply(self, span: Span, steps: int) -> None:
        """Bring pool and changes to the end of the span's first `steps` steps."""
        if not steps:
            return
        if span.changes:
            signed = np.concatenate(span.changes)
            if len(signed):
                self._changes.append(BlockChanges(np.full(len(signed), span.ends_s[0]), signed))
            span.changes = []
        if steps > span.applied_steps:
            taken, offsets = take_turns(self.pool, self._decoders, span.applied_steps, steps)
            span.applied_steps = steps
            if taken:
                at_s = span.ends_s[offsets]
                self._changes.append(BlockChanges(at_s, np.array(taken, np.int64)))
