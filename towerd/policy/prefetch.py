"""Decides what to bring into a tier before it is requested (PBKV, section 4.3). The caller moves the
bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from towerd.policy.base import Key


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key of the slower tier. value: its value per byte (see ReuseForecaster). Its parent is in
    the faster tier, or a candidate too, or None."""

    key: Key
    nbytes: int
    value: float
    parent: Key | None = None


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
