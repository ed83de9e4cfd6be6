"""Decides what to bring into a tier before it is requested (PBKV, section 4.3, and the variant of
appendix E). The caller moves the bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from towerd.policy.base import Key

ACTIVE_SHARE = 0.2
"""Share of the active bytes that the aggressive variant may displace: the paper's best."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key of the slower tier. value: its value per byte (see ReuseForecaster). Its parent is in
    the faster tier, or a candidate too, or None."""

    key: Key
    nbytes: int
    value: float
    parent: Key | None = None


@dataclass(frozen=True, slots=True)
class TierSpace:
    """Space in the faster tier. bandwidth_bytes: what can be copied during one decode step."""

    free_bytes: int
    retired_bytes: int
    active_bytes: int
    bandwidth_bytes: int
    only_decodes: bool
    """No prompt is being evaluated, so a copy delays no request."""


def budget(room: TierSpace, *, active_share: float = 0.0) -> int:
    """Bytes that may be prefetched now. active_share 0 is the conservative rule: free space and
    the bytes of retired keys, never of active ones. Raises ValueError for a share not in [0, 1]."""
    if not 0.0 <= active_share <= 1.0:
        raise ValueError(f"active_share is {active_share}, not between 0 and 1")
    if not room.only_decodes:
        return 0
    space = room.free_bytes + room.retired_bytes + int(active_share * room.active_bytes)
    return max(0, min(space, room.bandwidth_bytes))


def plan(candidates: Iterable[Candidate], bytes_max: int) -> list[Key]:
    """Keys to prefetch, in order: greedily by `value`, which is per byte, as a node of n bytes
    saves n bytes of work. Never a key before its parent, never one without value, and never more
    than `bytes_max`. A key that does not fit is skipped."""
    pool = {each.key: each for each in candidates}
    chosen: dict[Key, None] = {}
    left = bytes_max
    wanted = [each for each in pool.values() if each.value > 0]
    for each in sorted(wanted, key=lambda c: (-c.value, c.key)):
        chain: list[Candidate] = []
        at: Candidate | None = each
        while at is not None and at.key not in chosen:
            chain.append(at)
            at = pool.get(at.parent) if at.parent is not None else None
        nbytes = sum(link.nbytes for link in chain)
        if nbytes <= left:
            left -= nbytes
            chosen.update(dict.fromkeys(link.key for link in reversed(chain)))
    return list(chosen)
