"""Which bases of agents stay in a tier though no running workflow uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from towerd.policy.base import Key

_SHARE_MAX = 0.5
"""Share of the tier that kept bases may take."""
_TURNOVERS_MAX = 7.0
"""A base is kept if it is used at least once while the content of the tier is replaced so many times. On recorded
workflows that costs 0.4 to 1 of 100 tokens found, and to keep all that fit up to 8 (docs/log.md, 2026-11-29)."""
_AGAIN_MIN = 0.5
"""Share of a tenant's bases that several workflows used from which one that a single one used is kept, too."""
_TURNOVERS_KNOWN = 16
"""After so many turnovers the older half is forgotten."""
_KNOWN_MAX = 4096
"""Bases that are known; beyond that the one unused for longest is forgotten."""
_LOOKED_AT = 256
"""Bases whose bytes are added up for one eviction, on average."""


@dataclass(slots=True)
class _BaseUse:
    tenant: str
    first_s: float
    last_s: float


class Bases:
    """The keys that agents' prompts begin with, up to the first message. Those that are used often enough are
    kept: the ones with the most uses per second and byte, in a share of the tier that tenants divide."""

    def __init__(self) -> None:
        self._uses: dict[Key, _BaseUse] = {}
        self._kept: frozenset[Key] | None = None
        """As of the last look; None: there was none."""
        self._looks_due = 0
        """Evictions until the next look."""
        self._since_s: float | None = None
        self._evicted_bytes = 0.0
        """Since then."""

    def __contains__(self, key: Key) -> bool:
        return key in self._uses

    def copy(self) -> Bases:
        """An independent copy."""
        copied = Bases()
        copied._uses = {key: replace(use) for key, use in self._uses.items()}
        copied._kept = self._kept
        copied._since_s, copied._evicted_bytes = self._since_s, self._evicted_bytes
        return copied

    def used(self, keys: Iterable[Key], tenant: str, now: float) -> list[Key]:
        """An agent's prompt began with these. Returns those that are no bases any more, since too many others were
        used later."""
        if self._since_s is None:
            self._since_s = now
        for key in keys:
            use = self._uses.pop(key, None) or _BaseUse(tenant, now, now)
            use.last_s = max(use.last_s, now)
            self._uses[key] = use
        old = list(islice(self._uses, max(0, len(self._uses) - _KNOWN_MAX)))
        for key in old:
            self.forget(key)
        return old

    def forget(self, key: Key) -> None:
        """`key` left the tree."""
        self._uses.pop(key, None)
        self._kept = None if self._kept is None else self._kept - {key}

    def split(self, lower: Key, upper: Key) -> None:
        """`upper` is a beginning of what was `lower`."""
        if (use := self._uses.get(lower)) is not None:
            self._uses.setdefault(upper, replace(use))

    def is_kept(self, key: Key) -> bool:
        """Whether it comes after all that single workflows have for themselves, as of the last look. Before the
        first one all do."""
        return key in (self._uses if self._kept is None else self._kept)

    def look(
        self,
        size_of: Callable[[Key], int | None],
        n_workflows: Callable[[Key], int],
        now: float,
        tier_bytes: int,
    ) -> frozenset[Key]:
        """Before an eviction, choose anew which are kept, if a look is due; returns those for which that has changed.
        size_of: bytes of a key in the tier, or None; n_workflows: how many used it."""
        self._looks_due -= 1
        if self._looks_due > 0:
            return frozenset()
        self._looks_due = len(self._uses) // _LOOKED_AT
        turnover_s = self._turnover_s(now, tier_bytes)
        wait_s_max = _TURNOVERS_MAX * turnover_s
        again = self._shares_used_again(n_workflows, now - wait_s_max)
        due: dict[str, list[tuple[float, int, Key]]] = {}
        for key, use in self._uses.items():
            nbytes, n, p_again = size_of(key), n_workflows(key), again[use.tenant]
            if not nbytes or (n < 2 and p_again < _AGAIN_MIN):
                continue
            interval_s = max(1e-3, now - use.first_s) / max(1e-3, n - 1 + p_again)
            if max(interval_s, now - use.last_s) <= wait_s_max:
                due.setdefault(use.tenant, []).append((1 / interval_s / nbytes, nbytes, key))
        before = frozenset(self._uses) if self._kept is None else self._kept
        self._kept = frozenset(_fitting(due, int(_SHARE_MAX * tier_bytes)))
        return before ^ self._kept

    def evicted(self, nbytes: int) -> None:
        """So many bytes leave the tier."""
        self._evicted_bytes += nbytes

    def _turnover_s(self, now: float, tier_bytes: int) -> float:
        """In how many seconds as many bytes come as the tier has."""
        since_s = now if self._since_s is None else self._since_s
        if self._evicted_bytes > _TURNOVERS_KNOWN * tier_bytes:
            self._evicted_bytes /= 2
            self._since_s = since_s = (since_s + now) / 2
        n_came = tier_bytes + self._evicted_bytes
        return tier_bytes * max(0.0, now - since_s) / max(1.0, n_came)

    def _shares_used_again(
        self, n_workflows: Callable[[Key], int], since_s: float
    ) -> Mapping[str, float]:
        """By tenant: which share of its bases in use since then several workflows used, counting one more that
        they did, as nothing is known of the first."""
        counts: dict[str, tuple[int, int]] = {}
        for key, use in self._uses.items():
            n_again, n = counts.get(use.tenant, (1, 1))
            is_recent = use.last_s >= since_s
            is_again = is_recent and n_workflows(key) > 1
            counts[use.tenant] = n_again + is_again, n + is_recent
        return {tenant: n_again / n for tenant, (n_again, n) in counts.items()}


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
