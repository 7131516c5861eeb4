"""Pure: hits of a cache of any size, with the order of the latest use and with the best order.

A cache holds blocks, a whole request's at a time: what it finds is what was there when it came,
then all its blocks are the latest, the first of the prompt on top. As in the engine, the tail of a
prompt goes before its head, so what is held of a prompt is always a leading part.
"""

import heapq

import numpy as np
import numpy.typing as npt

from loadgen.analysis.history import Requests
from loadgen.analysis.reuse import Reuses

Ints = npt.NDArray[np.int64]


def counted_blocks(requests: Requests, reuses: Reuses) -> Ints:
    """Of every reuse the blocks that count as hits: an engine computes a prompt's last token."""
    hits_max = (requests.prompt_tokens - 1) // requests.block_size_tokens
    counted: Ints = np.clip(hits_max[reuses.reuser] - reuses.start, 0, reuses.length)
    return counted


def latest_use_hits(requests: Requests, reuses: Reuses, capacities_tokens: Ints) -> Ints:
    """Hit tokens of a cache that evicts what was used least recently (LRU), for each capacity.

    Exact: a run's first block is held if the capacity has room for what was touched after it.
    """
    sizes = requests.block_size_tokens[reuses.reuser]
    counted = counted_blocks(requests, reuses)
    hits = []
    for capacity_tokens in capacities_tokens.tolist():
        room_blocks = (capacity_tokens - reuses.above_tokens) // sizes
        hits.append(int((np.clip(room_blocks, 0, counted) * sizes).sum()))
    return np.array(hits, dtype=np.int64)


def best_hits(requests: Requests, reuses: Reuses, capacity_tokens: int) -> int:
    """Hit tokens of the best possible cache (Belady's): it evicts what is used again last.

    What is held is counted by the request that uses it next. Of a prompt the blocks that are used
    next by one request are a run, those of later ones lie behind it; so numbers are enough. A use
    that does not count as a hit is none: the block is there afterwards in any case.
    """
    order = np.argsort(reuses.toucher, kind="stable")
    touchers = reuses.toucher[order]
    firsts = np.searchsorted(touchers, np.arange(len(requests) + 1)).tolist()
    users = reuses.reuser[order].tolist()
    lengths = counted_blocks(requests, reuses)[order].tolist()
    sizes = requests.block_size_tokens.tolist()
    held = [0] * len(requests)  # blocks, by who uses them next
    latest: list[int] = []  # of those users, negative, the last one on top
    held_tokens = hit_tokens = 0
    for request in range(len(requests)):
        size = sizes[request]
        held_tokens -= held[request] * size
        hit_tokens += held[request] * size
        held[request] = 0
        for run in range(firsts[request], firsts[request + 1]):
            user = users[run]
            if not held[user] and lengths[run]:
                heapq.heappush(latest, -user)
            held[user] += lengths[run]
            held_tokens += lengths[run] * size
        while held_tokens > capacity_tokens:
            user = -latest[0]
            if not held[user]:
                heapq.heappop(latest)  # it has come, or nothing of it is left
                continue
            excess_blocks = -((capacity_tokens - held_tokens) // sizes[user])
            gone = min(held[user], excess_blocks)
            held[user] -= gone
            held_tokens -= gone * sizes[user]
    return hit_tokens


def capacities(requests: Requests, count: int) -> Ints:
    """Cache sizes in tokens from a single block to all distinct blocks, evenly by their logarithm.

    Args:
        requests: of a trace with blocks.
        count: how many at most.
    """
    least = int(requests.block_size_tokens.max(initial=1))
    most = max(least, int(requests.distinct_blocks) * least)
    sizes = np.geomspace(max(least, most / 1e4), most, count)
    rounded: Ints = np.unique(np.ceil(sizes / least).astype(np.int64) * least)
    return rounded
