"""Fetcher: fetches what a prompt begins with before it is evaluated, where that is sooner.

A request waits for it no longer than the evaluation of its unknown tokens would take, by the speed that was
measured last. What comes later is there for the next request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from towerd.errors import TowerdError
from towerd.store.sessions.deletions import DeletionWatch
from towerd.tiers.shared.bucket import BucketError
from towerd.tiers.shared.marks import MARK_TOKENS
from towerd.tiers.shared.objects import PutRows
from towerd.tiers.shared.tier import SharedTier
from towerd.tokens import Ids, common_prefix

log = logging.getLogger(__name__)

FIRST_WAIT_S = 2.0
"""A request waits at most for so long before the speed of evaluation is known."""
MEASURED_TOKENS_MIN = 64
"""Fewer evaluated tokens say little of the speed."""
FIND_S_MAX = 5.0
"""A request waits no longer until something is found."""
RECENT_REQUESTS = 32
"""The tokens of so many are taken as live, whose rows may be nowhere else."""
RETRY_S_MIN = 10.0
RETRY_S_MAX = 600.0


@dataclass(slots=True)
class _Lookup:
    """What is known of one while it runs."""

    ids: Ids
    scope: str
    n_known: int
    since: DeletionWatch
    is_found: bool = False
    is_late: bool = False


class Fetcher:
    """Belongs to the event loop; what takes time is done on a thread of its own, for one request at a time."""

    def __init__(self, shared: SharedTier) -> None:
        self._shared = shared
        self._thread = ThreadPoolExecutor(1, "towerd-fetch")
        self._settling = ThreadPoolExecutor(1, "towerd-settle")
        """Makes durable what was fetched, while the request runs."""
        self._running: asyncio.Future[None] | None = None
        self._tokens_per_s = 0.0
        """Of evaluation; 0: not measured."""
        self._recent: deque[tuple[str, Ids]] = deque(maxlen=RECENT_REQUESTS)
        self._retry_s, self._retry_at = 0.0, 0.0
        self._is_closed = False
        self._n_asked = self._n_found = self._n_late = 0

    def stats(self) -> dict[str, Any]:
        """Prompts that the bucket was asked for, those that it had something of, and those that did not wait
        for it to the end."""
        return {
            "lookups": self._n_asked,
            "lookups_found": self._n_found,
            "lookups_late": self._n_late,
        }

    async def before(self, ids: Ids, scope: str, since: DeletionWatch) -> None:
        """Wait for the rows of what `ids` begin with, if the bucket may have them. Raises nothing."""
        if len(ids) < MARK_TOKENS or not self._may_ask():
            return
        n_known = self._n_recent(ids, scope)
        n_known = max(n_known, await asyncio.to_thread(self._shared.n_stored, ids, scope))
        if len(ids) // MARK_TOKENS <= n_known // MARK_TOKENS or not self._may_ask():
            return
        limit_s = FIRST_WAIT_S
        if self._tokens_per_s:
            limit_s = (len(ids) - n_known) / self._tokens_per_s
        self._n_asked += 1
        loop, lookup = asyncio.get_running_loop(), _Lookup(ids, scope, n_known, since)
        self._running = running = loop.run_in_executor(self._thread, self._fetch, lookup)
        find_s = min(limit_s, FIND_S_MAX)
        await asyncio.wait((running,), timeout=find_s)
        if lookup.is_found and limit_s > find_s:
            await asyncio.wait((running,), timeout=limit_s - find_s)
        if not running.done():
            lookup.is_late = True
            self._n_late += 1
            self._rest()

    def _may_ask(self) -> bool:
        """Whether nothing else is fetched now, and the bucket answered in time when it was asked last."""
        is_busy = self._running is not None and not self._running.done()
        return not is_busy and not self._is_closed and time.monotonic() >= self._retry_at

    def evaluated(self, n_tokens: int, seconds: float) -> None:
        """Learn from a prompt how fast tokens are evaluated."""
        if n_tokens >= MEASURED_TOKENS_MIN and seconds > 0:
            speed = n_tokens / seconds
            self._tokens_per_s = (self._tokens_per_s + speed) / 2 if self._tokens_per_s else speed

    def is_worth_putting(self, n_tokens: int, n_bytes: int) -> bool:
        """Whether rows take no longer to put than their tokens to evaluate; so it is while one of the speeds is not
        known. Any thread may ask."""
        bytes_per_s = self._shared.put_bytes_per_s()
        if not self._tokens_per_s or not bytes_per_s:
            return True
        return n_bytes / bytes_per_s <= n_tokens / self._tokens_per_s

    def has_run(self, ids: Ids, scope: str) -> None:
        """Learn what is live now: the tokens of a request that was evaluated."""
        if len(ids) >= MARK_TOKENS:
            self._recent.append((scope, ids))

    async def close(self) -> None:
        """Wait for what runs; the bucket is closed by now."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._settling.shutdown)

    def _n_recent(self, ids: Ids, scope: str) -> int:
        """Tokens of a prompt that the last requests began with, too."""
        seen = (each for of, each in self._recent if of == scope)
        return max((common_prefix(each, ids) for each in seen), default=0)

    def _fetch(self, lookup: _Lookup) -> None:
        """On the thread."""
        ids, scope = lookup.ids, lookup.scope
        try:
            found = self._shared.find(ids, scope, lookup.n_known)
            if found is not None and self._is_sooner(found.put, lookup):
                self._n_found += 1
                lookup.is_found = True
                where = found.put, ids, scope, lookup.since
                try:
                    self._shared.fetch_path(*where, n_common=found.n_tokens, is_durable=False)
                finally:
                    self._settling.submit(self._shared.settle)
            if not lookup.is_late:
                self._retry_s = 0.0
        except BucketError as error:
            self._shared.counters.add(errors=1)
            if not self._retry_s:
                log.warning("prompts are not looked up now", extra={"error": error.message})
            if not lookup.is_late:
                self._rest()
        except TowerdError as error:  # deleted meanwhile, or the disk is full
            log.warning("rows of a prompt were not fetched", extra={"error": error.message})
        except Exception:
            log.exception("rows of a prompt were not fetched")
            self._rest()

    def _is_sooner(self, found: PutRows, lookup: _Lookup) -> bool:
        """Whether fetching is expected to be sooner than evaluating; so it is while one of the speeds is not known."""
        bytes_per_s, n = self._shared.bytes_per_s(), len(lookup.ids)
        if not self._tokens_per_s or not bytes_per_s:
            return True
        n_tokens = min(found.n_tokens, n) - lookup.n_known
        lacking = (each for each in found.rows if lookup.n_known < each.p1 and each.p0 < n)
        n_bytes = sum(each.n_bytes for each in lacking)
        states = (each.n_bytes for each in found.checkpoints if lookup.n_known < each.position <= n)
        n_bytes += max(states, default=0)
        return n_bytes / bytes_per_s < n_tokens / self._tokens_per_s

    def _rest(self) -> None:
        """Look nothing up for a while, longer each time."""
        self._retry_s = min(RETRY_S_MAX, max(RETRY_S_MIN, 2 * self._retry_s))
        self._retry_at = time.monotonic() + self._retry_s
