"""Prefetch: what the next step of a workflow is likely to begin with is made live before it is asked for.

As in PBKV (section 4.3) it is conservative: it takes free cells of the live context and those of
keys that are over, and runs while the engine is idle. Stored rows are restored, missing ones
evaluated. Nothing of it reaches the policies or the other tiers until a request uses it.

A prefetch is decided by the next step of its workflow. While those that were wrong are more than a
twentieth of a tenant's bytes that came into the live context, it has no more; and it has never more
than one undecided beside as many as were right in a row. One whose step does not come is waited for no longer
than UNDECIDED_S: then it is in vain, unless it is used later.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from towerd.policy.base import Key
from towerd.policy.predict.tenants import tenant_in
from towerd.policy.workflow_tree import NextStep
from towerd.store.tree.scope import tenant_of
from towerd.tiers.ranking import Ranking

CHANCE_MIN = 0.5
"""A step is prefetched for if it is at least as likely as all others together."""
WASTED_SHARE_MAX = 0.05
STEPS_MAX = 16
"""Steps considered at once, and prefetches undecided at once."""
UNDECIDED_S = 60.0
"""Time from the last rows that came for a step until it is not waited for any more."""
TENANTS_MAX = 256
"""Tenants with an account; beyond that the one that moved nothing for longest begins anew."""
_EXPECTED_BACK_MAX = 16
_WAIT_S = 5.0
_BURST_S = 2.0
"""The bandwidth accrued over this many seconds may be used at once after a pause."""


@dataclass(eq=False, slots=True)
class Prefetch:
    """What is brought for one step of a workflow, and what became of it."""

    step: NextStep
    nbytes: int = 0
    """Bytes of the rows that were restored or evaluated for it."""
    nbytes_used: int = 0
    """Bytes of those that a request used."""
    is_over: bool = False
    """The workflow has taken its step, has ended, or is not waited for any more: nothing more is brought."""
    is_done: bool = False
    """All there was to bring has been brought."""
    moved_s: float = field(default_factory=time.monotonic)
    """time.monotonic() at which rows came for it last."""

    @property
    def tenant(self) -> str:
        """Whose workflow it is."""
        return _tenant(self.step.workflow)


@dataclass(slots=True)
class _Account:
    """What one tenant's prefetches came to."""

    moved_bytes: int = 0
    """Bytes that came into the live context for its requests and prefetches."""
    wasted_bytes: int = 0
    n_open_max: int = 1

    @property
    def is_stopped(self) -> bool:
        return self.wasted_bytes > WASTED_SHARE_MAX * self.moved_bytes


class Prefetcher:
    """Chooses what to prefetch and keeps account of it. `step` is for the tier thread; `brought`,
    `used` and `moved` may be called by any thread, and wait for nothing that takes long."""

    def __init__(
        self,
        ranking: Ranking,
        bytes_per_s: int,
        clock: Callable[[], float],
        *,
        thaws_ahead: bool = False,
    ) -> None:
        """bytes_per_s: the bandwidth; 0: no prefetch. thaws_ahead: whether what is expected back is thawed
        without it, too."""
        self.bytes_used = self.bytes_wasted = self.nbytes = 0
        self.n_right = self.n_wrong = 0
        self._ranking = ranking
        self._bytes_per_s = bytes_per_s
        self._thaws_ahead = thaws_ahead
        self._clock = clock
        self._lock = threading.Lock()
        self._fetch: Callable[[Prefetch], None] | None = None
        self._is_quiet: Callable[[], bool] | None = None
        self._on_cold: Callable[[Key], None] | None = None
        self._open: list[Prefetch] = []
        self._asked: dict[str, int] = {}
        """By workflow: the number of the step after which something was prefetched for it."""
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        """By tenant, the one that moved something last at the end."""
        self._allowance = 0.0
        self._spent = 0
        self._last_s: float | None = None
        self._cold_due_s = 0.0

    def start(
        self,
        fetch: Callable[[Prefetch], None],
        is_quiet: Callable[[], bool],
        on_cold: Callable[[Key], None],
    ) -> None:
        """Start. fetch: brings what a step needs, in the background. is_quiet: whether the engine
        merely decodes or idles. on_cold: receives the ids of nodes that are expected back and have no rows
        anywhere, or are gone since their session was frozen, to thaw them ahead."""
        self._is_quiet, self._on_cold = is_quiet, on_cold
        self._fetch = fetch

    def stop(self) -> None:
        """Make no more callbacks."""
        self._fetch = self._is_quiet = self._on_cold = None

    @property
    def is_on(self) -> bool:
        """Whether something may be prefetched or thawed ahead: there is bandwidth, or it thaws ahead, and the
        policy forecasts."""
        return (self._bytes_per_s > 0 or self._thaws_ahead) and self._ranking.predicts_reuse

    def wait_s(self) -> float:
        """Seconds until `step` should be called again, if no workflow takes a step before."""
        return _WAIT_S if self.is_on else float("inf")

    def step(self, has_rows: Callable[[Key], bool]) -> None:
        """Settle what is decided, and prefetch for the steps that are likely now. has_rows: whether a node
        is in the tree and has rows in RAM or on disk"""
        if not self.is_on:
            return
        now = self._clock()
        self._settle()
        self._accrue(now)
        fetch = self._fetch
        steps = []
        if fetch is not None and self._allowance > 0.0:
            steps = self._ranking.next_steps(STEPS_MAX, CHANCE_MIN, self._leaves_out)
        for each in steps:
            if fetch is not None and not self._leaves_out(each.workflow, each.n_steps):
                self._asked[each.workflow] = each.n_steps
                made = Prefetch(each)
                with self._lock:
                    self._open.append(made)
                fetch(made)
        self._thaw_ahead(now, has_rows)

    # ---- the account ------------------------------------------------------------------------

    def moved(self, tenant: str, nbytes: int) -> None:
        """Rows came into the live context for a tenant, asked for or not."""
        with self._lock:
            self._account(tenant).moved_bytes += nbytes

    def brought(self, prefetch: Prefetch, nbytes: int) -> None:
        """Rows came into the live context for a prefetch."""
        with self._lock:
            prefetch.moved_s = time.monotonic()
            prefetch.nbytes += nbytes
            self.nbytes += nbytes
            if prefetch.is_over:
                self._waste(prefetch, nbytes)

    def used(self, prefetch: Prefetch, share: float = 1.0) -> None:
        """A request uses this share of what was prefetched, possibly later than it was expected."""
        with self._lock:
            nbytes = max(0, round(share * prefetch.nbytes) - prefetch.nbytes_used)
            prefetch.nbytes_used += nbytes
            self.bytes_used += nbytes
            if prefetch.is_over:
                self._waste(prefetch, -nbytes)

    def stats(self) -> dict[str, int]:
        """Counters; what is neither used nor wasted is undecided."""
        return {
            "prefetched_bytes": self.nbytes,
            "prefetched_bytes_used": self.bytes_used,
            "prefetched_bytes_wasted": self.bytes_wasted,
            "prefetches_right": self.n_right,
            "prefetches_wrong": self.n_wrong,
            "prefetch_stopped": int(
                any(each.is_stopped for each in self._accounts.copy().values())
            ),
        }

    def _leaves_out(self, workflow: str, n_steps: int) -> bool:
        """Whether nothing is to be prefetched for a workflow that has taken so many steps."""
        if self._asked.get(workflow) == n_steps:
            return True
        tenant = _tenant(workflow)
        with self._lock:
            account = self._accounts.get(tenant) or _Account()
            n_open = sum(each.tenant == tenant for each in self._open)
            return (
                account.is_stopped or n_open >= account.n_open_max or len(self._open) >= STEPS_MAX
            )

    def _account(self, tenant: str) -> _Account:
        found = self._accounts.setdefault(tenant, _Account())
        self._accounts.move_to_end(tenant)
        if len(self._accounts) > TENANTS_MAX:
            self._accounts.popitem(last=False)
        return found

    def _waste(self, prefetch: Prefetch, nbytes: int) -> None:
        self.bytes_wasted += nbytes
        self._account(prefetch.tenant).wasted_bytes += nbytes

    def _settle(self) -> None:
        """Decide those whose workflow has taken its step, or is over, and give up those that brought nothing or
        are not waited for any more."""
        if not self._asked:
            return
        now = self._ranking.n_steps(self._asked)
        self._asked = {name: n for name, n in self._asked.items() if now[name]}
        due_s = time.monotonic() - UNDECIDED_S
        with self._lock:
            for each in self._open[:]:
                is_decided = now.get(each.step.workflow, 0) != each.step.n_steps
                is_vain = (
                    each.is_done and not each.nbytes
                )  # it was live already, or there was no room
                if not is_decided and not is_vain and each.moved_s > due_s:
                    continue
                self._open.remove(each)
                each.is_over = True
                wasted = each.nbytes - each.nbytes_used
                self._waste(each, wasted)
                if not each.nbytes or not is_decided:
                    continue
                account = self._account(each.tenant)
                if each.nbytes_used >= wasted:
                    self.n_right += 1
                    account.n_open_max = min(STEPS_MAX, account.n_open_max + 1)
                else:
                    self.n_wrong += 1
                    account.n_open_max = 1

    def _accrue(self, now: float) -> None:
        if self._last_s is None:
            self._allowance = _BURST_S * self._bytes_per_s
        else:
            earned = max(0.0, now - self._last_s) * self._bytes_per_s
            self._allowance = min(_BURST_S * self._bytes_per_s, self._allowance + earned)
        self._last_s = now
        spent, self._spent = self.nbytes - self._spent, self.nbytes
        self._allowance -= spent

    def _thaw_ahead(self, now: float, has_rows: Callable[[Key], bool]) -> None:
        on_cold, is_quiet = self._on_cold, self._is_quiet
        if now < self._cold_due_s or on_cold is None or is_quiet is None or not is_quiet():
            return
        self._cold_due_s = now + _WAIT_S
        for end, _ in self._ranking.wanted(_EXPECTED_BACK_MAX):
            if not has_rows(end):
                on_cold(end)


def _tenant(workflow: str) -> str:
    return tenant_of(tenant_in([workflow]))
