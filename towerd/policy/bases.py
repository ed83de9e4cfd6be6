"""Which bases of agents stay in a tier though no running workflow uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from towerd.policy.base import Key

_SHARE_MAX = 0.1
"""Share of the tier that kept bases may take. More costs workflows what they have for themselves: on recorded
ones 2 to 5 of 100 tokens found at a quarter."""
_INTERVALS_MAX = 8.0
"""A base stays while it is idle for no more than so many of its own mean intervals between workflows: if these
are exponential, one use in 3,000 comes later."""
_IDLE_MIN_S, _IDLE_MAX_S = 120.0, 3600.0
_LOOKED_AT = 256
"""Bases whose bytes are added up for one eviction, on average."""


@dataclass(slots=True)
class _BaseUse:
    tenant: str
    first_s: float
    last_s: float


class Bases:
    """The keys that agents' prompts begin with, up to the first message. One is kept if several workflows used
    it and another is expected: those with the most uses per second and byte, in a share of the tier that
    tenants divide."""

    def __init__(self) -> None:
        self._uses: dict[Key, _BaseUse] = {}
        self._kept: frozenset[Key] = frozenset()
        """As of the last look."""
        self._looks_due = 0
        """Evictions until the next look."""

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def __iter__(self) -> Iterator[Key]:
        return iter(self._uses)

    def copy(self) -> Bases:
        """An independent copy."""
        copied = Bases()
        copied._uses = {
            key: _BaseUse(use.tenant, use.first_s, use.last_s) for key, use in self._uses.items()
        }
        copied._kept = self._kept
        return copied

    def used(self, keys: Iterable[Key], tenant: str, now: float) -> None:
        """An agent's prompt began with these."""
        for key in keys:
            use = self._uses.setdefault(key, _BaseUse(tenant, now, now))
            use.last_s = max(use.last_s, now)

    def forget(self, key: Key) -> None:
        """`key` left the tree."""
        self._uses.pop(key, None)

    def split(self, lower: Key, upper: Key) -> None:
        """`upper` is a beginning of what was `lower`."""
        if (use := self._uses.get(lower)) is not None:
            self._uses.setdefault(upper, _BaseUse(use.tenant, use.first_s, use.last_s))

    def is_kept(self, key: Key) -> bool:
        """Whether it comes after all that single workflows have for themselves, as of the last look."""
        return key in self._kept

    def look(
        self,
        size_of: Callable[[Key], int | None],
        n_workflows: Callable[[Key], int],
        now: float,
        tier_bytes: int,
    ) -> frozenset[Key]:
        """Before an eviction, choose anew which are kept, if a look is due; returns those for which that has
        changed. size_of: bytes of a key in the tier, or None; n_workflows: how many used it."""
        self._looks_due -= 1
        if self._looks_due > 0:
            return frozenset()
        self._looks_due = len(self._uses) // _LOOKED_AT
        due: dict[str, list[tuple[float, int, Key]]] = {}
        for key, use in self._uses.items():
            nbytes, n = size_of(key), n_workflows(key)
            if nbytes and _is_due(use, n, now):
                value = (n - 1) / max(1.0, now - use.first_s) / nbytes
                due.setdefault(use.tenant, []).append((value, nbytes, key))
        before, self._kept = self._kept, frozenset(_fitting(due, int(_SHARE_MAX * tier_bytes)))
        return before ^ self._kept


def _fitting(due: Mapping[str, list[tuple[float, int, Key]]], bytes_max: int) -> Iterator[Key]:
    """The most valuable ones of each tenant that fit into its part, those that need less leaving the rest to the
    others."""
    needs = sorted((sum(nbytes for _, nbytes, _ in of), tenant) for tenant, of in due.items())
    for n_before, (_, tenant) in enumerate(needs):
        left = part = bytes_max // (len(needs) - n_before)
        for _, nbytes, key in sorted(due[tenant], reverse=True):
            if nbytes > left:
                break
            left -= nbytes
            yield key
        bytes_max -= part - left


def _is_due(use: _BaseUse, n_workflows: int, now: float) -> bool:
    """Whether another workflow is expected to use it."""
    if n_workflows < 2:
        return False
    interval_s = (use.last_s - use.first_s) / (n_workflows - 1)
    idle_s_max = min(_IDLE_MAX_S, max(_IDLE_MIN_S, _INTERVALS_MAX * interval_s))
    return now - use.last_s <= idle_s_max
