"""Pure: all figures of a trace, from its reuses."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.analysis.caches import best_hits, capacities, counted_blocks, latest_use_hits
from loadgen.analysis.distributions import (
    Distribution,
    ExponentialFit,
    distribution,
    exponential_fit,
)
from loadgen.analysis.history import Requests
from loadgen.analysis.reuse import Reuses
from loadgen.analysis.working_set import Moment, working_set

Ints = npt.NDArray[np.int64]

CAPACITIES = 40
CATEGORIES_MAX = 24
ALL, OTHER = "all", "other"
_TURN_EDGES = (1, 2, 4, 8)  # turns from 0: where another group begins
_TURN_NAMES = ("turn 1", "turn 2", "turns 3-4", "turns 5-8", "turns 9+")
_IDEAL_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryFigures:
    """Requests of a type and turn.

    Attributes:
        name: type and turn, "all", or "other" for what is beyond CATEGORIES_MAX.
        requests: of it.
        blocks: full blocks of their prompts.
        reused_ratio: 0..1, how many of these were touched again later.
        gaps_s: time between a touch by this category and the next by anyone, counted by blocks.
        fit: of these gaps.
    """

    name: str
    requests: int
    blocks: int
    reused_ratio: float
    gaps_s: Distribution
    fit: ExponentialFit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKind:
    """Sessions of one turn, or those of several.

    Attributes:
        requests_ratio: of all requests, 0..1.
        prompt_tokens_ratio: of all prompt tokens.
        hit_ratio: their own, with an infinite cache.
        reuse_ratio: how much of all reuse is by them.
        own_session_ratio: how much of their reuse is of blocks their own session touched last.
    """

    requests_ratio: float
    prompt_tokens_ratio: float
    hit_ratio: float
    reuse_ratio: float
    own_session_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How unevenly reuse falls on blocks.

    Attributes:
        top_1_percent, top_10_percent: share of all reuses that the most reused blocks have.
        never_reused_ratio: blocks touched once, of all distinct blocks.
        blocks_ratio, reuses_ratio: the whole curve.
    """

    top_1_percent: float
    top_10_percent: float
    never_reused_ratio: float
    blocks_ratio: tuple[float, ...]
    reuses_ratio: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """Hit ratio, by tokens, against the size of the cache.

    Attributes:
        capacity_tokens: sizes.
        latest_use: with LRU.
        best: with Belady's order.
        latest_use_tokens: size at which LRU has 50, 90, 99 percent of the ideal hit ratio.
    """

    capacity_tokens: tuple[int, ...]
    latest_use: tuple[float, ...]
    best: tuple[float, ...]
    latest_use_tokens: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFigures:
    """Everything about one trace. Ratios are 0..1, sums over sums; lengths are tokens."""

    requests: int
    sessions: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    block_sizes_tokens: tuple[int, ...]
    blocks: int
    distinct_blocks: int
    ideal_hit_ratio: float
    reused_blocks_ratio: float
    skew: Skew
    single_turn: SessionKind
    multi_turn: SessionKind
    categories: tuple[CategoryFigures, ...]
    lifespan_of_reused_s: Distribution
    working_set: tuple[Moment, ...]
    caches: CacheFigures
    prompt_lengths: Distribution
    prefix_lengths: Distribution
    output_lengths: Distribution
    turns_per_session: Distribution


def figures(
    requests: Requests, reuses: Reuses, on_capacity: Callable[[], None] | None = None
) -> TraceFigures:
    """All figures. `on_capacity` is called CAPACITIES times at most, after each cache size."""
    sizes = requests.block_size_tokens
    counted_tokens = counted_blocks(requests, reuses) * sizes[reuses.reuser]
    hits = np.bincount(reuses.reuser, counted_tokens, len(requests)).astype(np.int64)
    arrival_s = requests.arrival_s
    reused = reuses.touches > 1
    lifespans_s = arrival_s[reuses.last_touch[reused]] - arrival_s[reuses.first_touch[reused]]
    turns = np.unique(reuses.session, return_counts=True)[1]
    single = (turns == 1)[np.searchsorted(np.unique(reuses.session), reuses.session)]
    return TraceFigures(
        requests=len(requests),
        sessions=len(turns),
        duration_s=float(arrival_s[-1] - arrival_s[0]),
        prompt_tokens=int(requests.prompt_tokens.sum()),
        output_tokens=int(requests.output_tokens.sum()),
        block_sizes_tokens=tuple(np.unique(sizes).tolist()),
        blocks=int(requests.blocks.sum()),
        distinct_blocks=requests.distinct_blocks,
        ideal_hit_ratio=_ratio(hits.sum(), requests.prompt_tokens.sum()),
        reused_blocks_ratio=_ratio(reuses.length.sum(), requests.blocks.sum()),
        skew=_skew(reuses.touches.astype(np.int64) - 1),
        single_turn=_kind(requests, reuses, hits, single),
        multi_turn=_kind(requests, reuses, hits, ~single),
        categories=_categories(requests, reuses),
        lifespan_of_reused_s=distribution(lifespans_s),
        working_set=working_set(requests, reuses),
        caches=_caches(requests, reuses, int(hits.sum()), on_capacity),
        prompt_lengths=distribution(requests.prompt_tokens),
        prefix_lengths=distribution(hits),
        output_lengths=distribution(requests.output_tokens),
        turns_per_session=distribution(turns),
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _skew(reuses: Ints) -> Skew:
    """Of how often each block was touched again."""
    count, total = len(reuses), int(reuses.sum())
    if not count:
        return Skew(
            top_1_percent=0.0,
            top_10_percent=0.0,
            never_reused_ratio=0.0,
            blocks_ratio=(),
            reuses_ratio=(),
        )
    most_first = np.concatenate(([0], np.cumsum(np.sort(reuses)[::-1])))

    def share(blocks_ratio: float) -> float:
        return _ratio(most_first[int(np.ceil(blocks_ratio * count))], total)

    ratios = tuple(float(f"{ratio:.3g}") for ratio in (0.0, *np.geomspace(1e-4, 1, 60)))
    return Skew(
        top_1_percent=share(0.01),
        top_10_percent=share(0.1),
        never_reused_ratio=float((reuses == 0).mean()),
        blocks_ratio=ratios,
        reuses_ratio=tuple(map(share, ratios)),
    )


def _kind(
    requests: Requests, reuses: Reuses, hits: Ints, chosen: npt.NDArray[np.bool_]
) -> SessionKind:
    by_it = chosen[reuses.reuser]
    own = reuses.session[reuses.toucher] == reuses.session[reuses.reuser]
    prompt_tokens = requests.prompt_tokens[chosen].sum()
    return SessionKind(
        requests_ratio=float(chosen.mean()),
        prompt_tokens_ratio=_ratio(prompt_tokens, requests.prompt_tokens.sum()),
        hit_ratio=_ratio(hits[chosen].sum(), prompt_tokens),
        reuse_ratio=_ratio(reuses.length[by_it].sum(), reuses.length.sum()),
        own_session_ratio=_ratio(reuses.length[by_it & own].sum(), reuses.length[by_it].sum()),
    )


def _categories(requests: Requests, reuses: Reuses) -> tuple[CategoryFigures, ...]:
    """All, then by blocks; a reuse is credited to the category that touched the block last."""
    groups = len(_TURN_NAMES)
    of_request = requests.category * groups + np.digitize(reuses.turn, _TURN_EDGES)
    gaps_s = requests.arrival_s[reuses.reuser] - requests.arrival_s[reuses.toucher]
    kinds, places = np.unique(of_request, return_inverse=True)
    blocks = np.bincount(places, requests.blocks, len(kinds))
    ranked = np.argsort(-blocks, kind="stable").tolist()

    def one(name: str, chosen: npt.NDArray[np.bool_]) -> CategoryFigures:
        credited = chosen[reuses.toucher]
        lengths = reuses.length[credited]
        return CategoryFigures(
            name=name,
            requests=int(chosen.sum()),
            blocks=int(requests.blocks[chosen].sum()),
            reused_ratio=_ratio(lengths.sum(), requests.blocks[chosen].sum()),
            gaps_s=distribution(gaps_s[credited], lengths),
            fit=exponential_fit(gaps_s[credited], lengths),
        )

    found = [one(ALL, np.ones(len(requests), np.bool_))]
    for place in ranked[:CATEGORIES_MAX]:
        kind, turn = divmod(int(kinds[place]), groups)
        name = f"{requests.categories[kind]}, {_TURN_NAMES[turn]}"
        found.append(one(name, places == place))
    if rest := ranked[CATEGORIES_MAX:]:
        found.append(one(OTHER, np.isin(places, rest)))
    return tuple(found)


def _caches(
    requests: Requests, reuses: Reuses, ideal_tokens: int, on_capacity: Callable[[], None] | None
) -> CacheFigures:
    sizes = capacities(requests, CAPACITIES)
    prompt_tokens = int(requests.prompt_tokens.sum())
    latest_use = latest_use_hits(requests, reuses, sizes)
    best = []
    for size in sizes.tolist():
        best.append(_ratio(best_hits(requests, reuses, size), prompt_tokens))
        if on_capacity is not None:
            on_capacity()
    reached = {}
    for share in _IDEAL_SHARES:
        place = int(np.argmax(latest_use >= share * ideal_tokens))
        reached[f"{share:.0%}"] = int(sizes[place])
    return CacheFigures(
        capacity_tokens=tuple(sizes.tolist()),
        latest_use=tuple((latest_use / prompt_tokens).tolist()),
        best=tuple(best),
        latest_use_tokens=reached,
    )
