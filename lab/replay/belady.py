"""Belady's bound: no policy that serves the same requests in the same order can beat it.

Belady's rule evicts the item whose next use is last. In a tree a parent is used whenever its child
is, so its next use is never later and the rule respects the tree by itself. Blocks of one segment
are always used together; the bound may keep a part of a segment, so it is optimal in blocks and
holds for every policy that keeps or evicts whole segments.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right

from lab.replay.trace import Trace

_NEVER = 1 << 60


def belady_hits(trace: Trace, capacity_blocks: int) -> list[int]:
    """Blocks of each request that the optimum finds in a cache of `capacity_blocks`."""
    uses: dict[int, list[int]] = {}
    for i, call in enumerate(trace.calls):
        for segment in call.path:
            uses.setdefault(segment, []).append(i)
    held = [0] * len(trace.parents)
    n_children = [0] * len(trace.parents)
    heap: list[tuple[int, int]] = []  # (-next use, segment), leaves only; stale ones are skipped
    n_held = 0
    hits: list[int] = []

    def next_use(segment: int, now: int) -> int:
        at = bisect_right(uses[segment], now)
        return uses[segment][at] if at < len(uses[segment]) else _NEVER

    for now, call in enumerate(trace.calls):
        n_hit = 0
        for segment in call.path:
            have, size = held[segment], trace.n_blocks[segment]
            n_hit += have
            if have < size:
                n_held += size - have
                held[segment] = size
                parent = trace.parents[segment]
                if not have and parent >= 0:
                    n_children[parent] += 1
        hits.append(n_hit)
        leaf = call.path[-1]
        heapq.heappush(heap, (-next_use(leaf, now), leaf))
        while n_held > capacity_blocks:
            rank, segment = heapq.heappop(heap)
            if not held[segment] or n_children[segment] or -rank != next_use(segment, now):
                continue
            drop = min(held[segment], n_held - capacity_blocks)
            held[segment] -= drop
            n_held -= drop
            parent = trace.parents[segment]
            if held[segment]:
                heapq.heappush(heap, (rank, segment))
            elif parent >= 0:
                n_children[parent] -= 1
                if not n_children[parent]:
                    heapq.heappush(heap, (-next_use(parent, now), parent))
    return hits
