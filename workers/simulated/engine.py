"""The simulated engine: scheduler and block pool in virtual time. Pure: no clock, no I/O.

A caller alternates `start_step` and `finish_step`. Between the two, the step's duration passes,
in real time (server) or by adding it to a number (offline simulation); requests may be added or
aborted meanwhile.

Scheduling follows vLLM's v1 scheduler: running requests first, each with as many tokens as the
budget allows; then waiting ones in order of arrival, up to the sequence limit; a prompt is
prefilled in chunks under the token budget; when blocks run out, the youngest running request is
preempted and recomputed later. A waiting request is admitted only when its whole prompt fits.
Blocks become resident when they are scheduled to be full, hence are hittable while the rest of
the prompt is still being prefilled. What the device lacks of a prompt may be loaded from a tier
(`workers.simulated.tier`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from workers.simulated.block_pool import BlockPool
from workers.simulated.cost_model import CostModel
from workers.simulated.eviction.base import EvictionOrder
from workers.simulated.kv_events import DEVICE_MEDIUM, BlocksRemoved, BlocksStored
from workers.simulated.request import TOKEN_BYTES, ActiveRequest, Request
from workers.simulated.step import Admission, EngineTotals, Step, StepOutput, Token
from workers.simulated.tier import KvTier


class RequestTooLongError(ValueError):
    """Prompt and answer together do not fit the block pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.

    Attributes:
        cost: step times.
        block_size_tokens: tokens per block.
        capacity_blocks: blocks in the pool.
        max_num_seqs: requests in the batch at most.
        max_num_batched_tokens: tokens computed in a step at most.
        output_ids: token ids that answers are made of.
    """

    cost: CostModel
    block_size_tokens: int
    capacity_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    output_ids: Sequence[int]


class Engine:
    """One simulated instance."""

    def __init__(
        self,
        config: EngineConfig,
        tier: KvTier | None = None,
        order: EvictionOrder | None = None,
    ) -> None:
        """An empty engine; engines that are given one tier share it.

        Args:
            config: its limits.
            tier: behind its blocks; None: there is none.
            order: of eviction, its own; None: least recently used first.
        """
        self.config = config
        self.tier = tier
        self.totals = EngineTotals()
        demote = tier.demote if tier is not None and tier.config.takes_evicted else None
        self.pool = BlockPool(config.capacity_blocks, order, demote)
        self._now_s = 0.0  # begin of the step in progress, or end of the last one
        self._active: dict[str, ActiveRequest] = {}
        self._running: list[ActiveRequest] = []
        self._waiting: deque[ActiveRequest] = deque()
        self._kept: dict[str, list[int]] = {}  # blocks of finished requests, for another engine

    @property
    def running_count(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Requests queued, preempted ones included."""
        return len(self._waiting)

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the blocks held by requests, 0..1."""
        return self.pool.used_count / self.pool.capacity_blocks

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestTooLongError: it could not finish even alone.
        """
        assert min(request.prompt_tokens, request.output_tokens) >= 1, request.request_id
        assert request.request_id not in self._active, request.request_id
        held_tokens = request.prompt_tokens + request.output_tokens - 1
        if held_tokens > self.config.capacity_blocks * self.config.block_size_tokens:
            raise RequestTooLongError(
                f"{held_tokens} tokens do not fit {self.config.capacity_blocks} blocks of "
                f"{self.config.block_size_tokens} tokens"
            )
        active = ActiveRequest(request, self.config.block_size_tokens)
        self._active[request.request_id] = active
        self._waiting.append(active)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks at once; False when it is not here (any more)."""
        active = self._active.pop(request_id, None)
        if active is None:
            return False
        queue = self._running if active.block_ids else self._waiting
        queue.remove(active)
        self.pool.release(active.forget_blocks())
        return True

    def kept_blocks(self, request_id: str) -> list[int]:
        """Blocks held for a finished request that keeps them; none when it does not."""
        return self._kept.get(request_id, [])

    def release_kept(self, request_id: str) -> None:
        """Let the blocks of a finished request go, if they are still held."""
        self.pool.release(self._kept.pop(request_id, []))

    def device_hit_tokens(self, request: Request) -> int:
        """Leading tokens of its prompt that are resident now; whole blocks, not the last token."""
        block_size = self.config.block_size_tokens
        hashes = ActiveRequest(request, block_size).hashes
        return len(self.pool.match(hashes, (request.prompt_tokens - 1) // block_size)) * block_size

    def reset_prefix_cache(self) -> bool:
        """Forget all resident blocks; refused (False) while requests hold any.

        The event leaves with the next step, so an idle engine says nothing until then, as vLLM.
        """
        return self.pool.reset()

    def start_step(self, now_s: float | None = None) -> Step | None:
        """Schedule the next step; None when there is nothing to compute.

        Args:
            now_s: when it begins, which only eviction policies look at; None: as the last one ends.
        """
        if now_s is not None:
            self._now_s = now_s
        batch: list[tuple[ActiveRequest, int]] = []
        budget, preempted = self._schedule_running(batch)
        admissions, load_s = ([], 0.0) if preempted else self._schedule_waiting(batch, budget)
        if not batch:
            return None
        duration_s = self._duration_s(batch) + load_s
        self.totals.busy_s += duration_s
        return Step(duration_s=duration_s, admissions=admissions, batch=batch)

    def finish_step(self, step: Step) -> StepOutput:
        """The step's time has passed: hand out its tokens and events, free what has finished."""
        tokens = []
        active_by_id = self._active
        finished = False
        self._now_s += step.duration_s
        for active, count in step.batch:
            request = active.request
            if active_by_id.get(request.request_id) is not active:
                continue  # aborted during the step
            active.computed_tokens += count
            if active.computed_tokens < active.token_count:
                continue  # prefill goes on
            position = active.generated_tokens
            active.generated_tokens = position + 1
            active.token_count += 1
            last = position + 1 == request.output_tokens
            tokens.append(Token(request, position, last))
            if not position:
                self.totals.prompt_tokens += request.prompt_tokens
                if self.tier is not None and not self.tier.config.takes_evicted:
                    self._write(active, self.tier)
            if last:
                finished = True
                self.pool.order.advance(self._now_s)
                del active_by_id[request.request_id]
                held = active.forget_blocks()
                if request.keeps_blocks:
                    self._kept[request.request_id] = held
                else:
                    self.pool.release(held)
        if finished:
            self._running = [active for active in self._running if active.block_ids]
        self.totals.generated_tokens += len(tokens)
        events, self.pool.events = self.pool.events, []
        return StepOutput(tokens=tokens, events=events)

    def _schedule_running(self, batch: list[tuple[ActiveRequest, int]]) -> tuple[int, bool]:
        """Give running requests their tokens; returns the rest of the budget and "preempted"."""
        budget = self.config.max_num_batched_tokens
        block_size = self.config.block_size_tokens
        preempted = False
        index = 0
        while index < len(self._running) and budget:
            active = self._running[index]
            count = min(active.token_count - active.computed_tokens, budget)
            end = active.computed_tokens + count
            lacking = -(-end // block_size) - len(active.block_ids)
            if lacking > 0:
                while lacking > self.pool.free_count and len(self._running) > index:
                    self._preempt_youngest()
                    preempted = True
                if len(self._running) == index:
                    break  # it was the youngest itself
                active.block_ids += self.pool.allocate(lacking)
            if end // block_size > active.stored_blocks:
                self._store_full_blocks(active, end // block_size)
            batch.append((active, count))
            budget -= count
            index += 1
        return budget, preempted

    def _schedule_waiting(
        self, batch: list[tuple[ActiveRequest, int]], budget: int
    ) -> tuple[list[Admission], float]:
        """Admit waiting requests in order while budget, sequence limit and blocks allow.

        Returns:
            those admitted for the first time, and how long all that were admitted load, in seconds.
        """
        config, pool, tier = self.config, self.pool, self.tier
        block_size = config.block_size_tokens
        admissions: list[Admission] = []
        load_s = 0.0
        while self._waiting and budget and len(self._running) < config.max_num_seqs:
            active = self._waiting[0]
            # The last token is always recomputed: its logits are needed.
            usable = (active.token_count - 1) // block_size
            hit = pool.match(active.hashes, usable)
            lacking = -(-active.token_count // block_size) - len(hit)
            if lacking + pool.idle_count(hit) > pool.free_count:
                break
            self._waiting.popleft()
            self._running.append(active)
            pool.order.advance(self._now_s)
            pool.order.begin(active.request.request_id)
            pool.hold(hit, active.request.category)
            loaded = 0
            is_received = active.request.received and active.hit_tokens is None
            if tier is not None and not is_received:
                loaded = tier.match(active.hashes[len(hit) : usable])
                load_s += tier.config.load_s(loaded * block_size)
            start = active.token_count - 1 if is_received else (len(hit) + loaded) * block_size
            count = min(active.token_count - start, budget)
            active.block_ids = hit + pool.allocate(-(-(start + count) // block_size) - len(hit))
            active.computed_tokens = start
            active.stored_blocks = len(hit)
            if (start + count) // block_size > len(hit):
                self._store_full_blocks(active, (start + count) // block_size)
            if active.hit_tokens is None:
                active.hit_tokens = len(hit) * block_size
                elsewhere = start - active.hit_tokens
                admission = Admission(active.request, active.hit_tokens, elsewhere)
                self.totals.count(active.token_count, *admission[1:])
                admissions.append(admission)
            batch.append((active, count))
            budget -= count
        self.totals.tier_load_s += load_s
        return admissions, load_s

    def _preempt_youngest(self) -> None:
        active = self._running.pop()
        self.pool.release(active.forget_blocks())
        active.preemption_count += 1
        self.totals.preemption_count += 1
        self._waiting.appendleft(active)

    def _store_full_blocks(self, active: ActiveRequest, full_blocks: int) -> None:
        """Make blocks resident up to `full_blocks` and say so in one event."""
        start = active.stored_blocks
        block_size = self.config.block_size_tokens
        if full_blocks > len(active.hashes):
            active.materialize(full_blocks, block_size, self.config.output_ids)
        hashes = active.hashes[start:full_blocks]
        self.pool.store(active.block_ids[start:full_blocks], hashes, active.request.category)
        active.stored_blocks = full_blocks
        self.pool.events.append(self._stored(active, start, full_blocks, DEVICE_MEDIUM))

    def _write(self, active: ActiveRequest, tier: KvTier) -> None:
        """The prompt is computed: its full blocks go to the tier, which its events may tell of."""
        full_blocks = active.request.prompt_tokens // self.config.block_size_tokens
        hashes = active.hashes[:full_blocks]
        held = tier.match(hashes)  # chains leave the tier from their tails, so the rest is new
        dropped = tier.write(hashes)
        if tier.medium is None:
            return
        if held < full_blocks:
            self.pool.events.append(self._stored(active, held, full_blocks, tier.medium))
        if dropped:
            removed = BlocksRemoved(block_hashes=tuple(dropped), medium=tier.medium)
            self.pool.events.append(removed)

    def _stored(self, active: ActiveRequest, start: int, end: int, medium: str) -> BlocksStored:
        """What tells of a request's blocks."""
        request, block_size = active.request, self.config.block_size_tokens
        stride = block_size * TOKEN_BYTES
        return BlocksStored(
            block_hashes=tuple(active.hashes[start:end]),
            parent_block_hash=active.hashes[start - 1] if start else None,
            packed_tokens=bytes(active.packed[start * stride : end * stride]),
            block_size_tokens=block_size,
            adapter=request.adapter,
            adapter_id=request.adapter_id,
            salt=request.salt,
            session_id=request.session_id,
            medium=medium,
        )

    def _duration_s(self, batch: list[tuple[ActiveRequest, int]]) -> float:
        tokens = 0
        prefill_pairs = 0.0
        decode_context_tokens = 0
        for active, count in batch:
            tokens += count
            if count == 1 and active.generated_tokens:
                decode_context_tokens += active.token_count
            else:
                prefill_pairs += count * (active.computed_tokens + (count + 1) / 2)
        return self.config.cost.step_s(
            tokens=tokens, prefill_pairs=prefill_pairs, decode_context_tokens=decode_context_tokens
        )
