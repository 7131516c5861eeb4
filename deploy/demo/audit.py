"""Pure: is every difference between predicted and actual hit tokens explained by a block event?

A prediction is made when the router decides; the hit happens when the engine admits the request.
In between blocks come and go. A difference is explained only if the sidecar's journal shows, on
that very instance, the blocks that make the difference changing in between.
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

from indexer.contract import block_hash
from indexer.contract.identifiers import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What is known of one answered request. Times are wall clock.

    Attributes:
        request_id: as the answer's header told.
        instance_id: who answered.
        decided_s: when the router read what it decided on.
        first_token_s: when the client had the first token.
        prompt: token ids.
        predicted_tokens: hit tokens of the decision.
        actual_tokens: cached tokens of the engine's usage.
        in_flight_tokens: those predicted only for a request in flight that was about to compute
            them.
    """

    request_id: str
    instance_id: str
    decided_s: float
    first_token_s: float
    prompt: Sequence[int]
    predicted_tokens: int
    actual_tokens: int
    in_flight_tokens: int = 0


class Verdict(Enum):
    """What became of a prediction."""

    EXACT = "exact"
    EXPLAINED = "explained"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Journal:
    """What sidecars published: (instance, block) -> times of its changes, in published order.

    A time is (published_s, engine_s): when readers of the index could know, and when the engine did
    it at the earliest: a busy sidecar writes several of its batches at once (where it cannot tell:
    when it was published). A block that was gone for a while, although the index had it all the
    time, counts as removed; one that was there for a while, which the index never had, as added.
    """

    added: Mapping[tuple[str, BlockHash], Sequence[tuple[float, float]]]
    removed: Mapping[tuple[str, BlockHash], Sequence[tuple[float, float]]]

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Self:
        """Read journals: the JSON lines that `indexer.publishing.journal` writes.

        Raises:
            ValueError: a line is not JSON, or a hash is not hexadecimal.
            KeyError: a field is missing.
        """
        added: dict[tuple[str, BlockHash], list[tuple[float, float]]] = defaultdict(list)
        removed: dict[tuple[str, BlockHash], list[tuple[float, float]]] = defaultdict(list)
        for line in lines:
            entry = json.loads(line)
            published_s = entry["published_s"]
            engine_s = entry.get("oldest_engine_ts_s") or entry["engine_ts_s"]
            times = (published_s, published_s if engine_s is None else engine_s)
            came_back, came_and_went = entry.get("came_back", ()), entry.get("came_and_went", ())
            for changes, texts in (
                (added, (*entry["added"], *came_and_went)),
                (removed, (*entry["removed"], *came_back)),
            ):
                for text in texts:
                    changes[entry["instance_id"], BlockHash(bytes.fromhex(text))].append(times)
        return cls(added, removed)


def judge(
    request: ServedRequest, journal: Journal, *, root: BlockHash, block_size_tokens: int
) -> Verdict:
    """Compare one prediction with what happened.

    More hits than predicted are explained when every block beyond the prediction was published
    after the decision and stored before the first token. Fewer are explained when one of the
    missing blocks was taken back in that window: a hole ends the hit; or when the index promised
    no more and the request in flight that did came to the engine later.

    Args:
        request: the request.
        journal: of all instances.
        root: start of the fleet's block chains.
        block_size_tokens: of the fleet.
    """
    predicted = request.predicted_tokens // block_size_tokens
    actual = request.actual_tokens // block_size_tokens
    if request.predicted_tokens == request.actual_tokens:
        return Verdict.EXACT
    packed = block_hash.pack_tokens(request.prompt)
    chain = block_hash.split(block_hash.chain(root, packed, block_size_tokens))

    def changed(
        changes: Mapping[tuple[str, BlockHash], Sequence[tuple[float, float]]], block: BlockHash
    ) -> bool:
        times = changes.get((request.instance_id, block), ())
        first_unknown = bisect_right(times, request.decided_s, key=lambda time: time[0])
        return any(engine_s <= request.first_token_s for _, engine_s in times[first_unknown:])

    if actual > predicted:
        beyond = chain[predicted:actual]
        explained = len(beyond) == actual - predicted and all(
            changed(journal.added, block) for block in beyond
        )
    elif 0 < request.predicted_tokens - request.actual_tokens <= request.in_flight_tokens:
        explained = True
    else:
        explained = any(changed(journal.removed, block) for block in chain[actual:predicted])
    return Verdict.EXPLAINED if explained else Verdict.UNEXPLAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The verdicts over a run.

    Attributes:
        requests: how many were judged.
        exact: predictions that came true to the token.
        unexplained: the requests whose difference nothing explains.
    """

    requests: int
    exact: int
    unexplained: tuple[ServedRequest, ...]

    @property
    def predicted_exactly_share(self) -> float:
        """Exact predictions / requests, 0..1; 0 without requests."""
        return self.exact / self.requests if self.requests else 0.0

    @property
    def mismatch_unexplained_share(self) -> float:
        """Unexplained differences / requests, 0..1; 0 without requests."""
        return len(self.unexplained) / self.requests if self.requests else 0.0


def audit(
    requests: Sequence[ServedRequest], journal: Journal, *, root: BlockHash, block_size_tokens: int
) -> Audit:
    """Judge every request of a run."""
    verdicts = [
        judge(request, journal, root=root, block_size_tokens=block_size_tokens)
        for request in requests
    ]
    return Audit(
        requests=len(requests),
        exact=verdicts.count(Verdict.EXACT),
        unexplained=tuple(
            request
            for request, verdict in zip(requests, verdicts, strict=True)
            if verdict is Verdict.UNEXPLAINED
        ),
    )
