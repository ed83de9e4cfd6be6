"""Lookups: what is stored of a prompt, found and checked on threads of their own.

Whoever checks rows reads every byte of them, and a bucket takes as long as it likes: vLLM's scheduler waits for neither.
It schedules other requests until a look-up has ended.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from towerd.connectors.vllm.vllm_store import StoredPrefix, VllmStore
from towerd.errors import TowerdError
from towerd.tokens import Ids

log = logging.getLogger(__name__)

THREADS = 2
WAIT_S_MAX = 0.001
"""The scheduler waits so long in one step for all look-ups that are about to end: else they would be known a step
later."""
IDLE_WAIT_S_MAX = 0.01
"""If the last step had nothing to do: nobody waits for the next one."""


@dataclass(slots=True, eq=False)
class _PromptLookup:
    ids: Ids
    scope: str
    p0: int
    check: Future[StoredPrefix]
    start: int
    """vLLM has the tokens before; `p0` or later."""
    is_shared_done: bool = False


class Lookups:
    """Belongs to the scheduler's thread."""

    def __init__(self, store: VllmStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(THREADS, "towerd-lookup")
        self._lookups: dict[str, _PromptLookup] = {}
        self._wait_s = WAIT_S_MAX

    def begin_step(self, *, is_idle: bool) -> None:
        """vLLM has planned a step. is_idle: one without any token"""
        self._wait_s = IDLE_WAIT_S_MAX if is_idle else WAIT_S_MAX

    def has(self, request_id: str, n_tokens: int, p0: int) -> bool:
        """Whether the first `n_tokens` of a request were asked for, from token `p0` on or from one before."""
        known = self._lookups.get(request_id)
        return known is not None and len(known.ids) == n_tokens and known.p0 <= p0

    def begin(self, request_id: str, ids: Ids, scope: str, p0: int) -> None:
        """Look for rows of `ids` from token `p0` on."""
        self.forget(request_id)
        check = self._threads.submit(self._check, ids, scope, p0)
        self._lookups[request_id] = _PromptLookup(ids, scope, p0, check, p0)

    def n_found(self, request_id: str, start: int) -> int | None:
        """How many tokens from `start` on are stored; None: it is not known yet."""
        lookup = self._lookups[request_id]
        lookup.start = start
        found = self._checked(lookup)
        if found is None:
            return None
        shared = self._store.shared
        if shared is not None and not lookup.is_shared_done:
            has_fetched = shared.has_fetched(request_id, lookup.ids, lookup.scope, found.p1)
            if has_fetched is None:
                return None
            lookup.is_shared_done = True
            if has_fetched:
                lookup.check = self._threads.submit(
                    self._check, lookup.ids, lookup.scope, lookup.p0
                )
                found = self._checked(lookup)
        return None if found is None else max(0, found.p1 - start)

    def take(self, request_id: str) -> StoredPrefix | None:
        """What was found, from where `n_found` was last asked for; None if there is nothing. It is forgotten here."""
        lookup = self._lookups.get(request_id)
        self.forget(request_id)
        if lookup is None or not lookup.check.done() or lookup.check.cancelled():
            return None
        found = lookup.check.result()
        return found.part(lookup.start, found.p1) if found.p1 > lookup.start else None

    def forget(self, request_id: str) -> None:
        """The request needs no look-up any more."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            lookup.check.cancel()
            if self._store.shared is not None:
                self._store.shared.forget(request_id)

    def clear(self) -> None:
        """Forget all."""
        for request_id in list(self._lookups):
            self.forget(request_id)

    def close(self) -> None:
        """Forget all, and wait for what runs."""
        self.clear()
        self._threads.shutdown()

    def _checked(self, lookup: _PromptLookup) -> StoredPrefix | None:
        check = lookup.check
        if not check.done() and self._wait_s > 0:
            began = time.monotonic()
            wait((check,), self._wait_s)
            self._wait_s -= time.monotonic() - began
        return check.result() if check.done() else None

    def _check(self, ids: Ids, scope: str, p0: int) -> StoredPrefix:
        """On a thread. Raises nothing: what cannot be read is evaluated."""
        found: StoredPrefix | None = None
        try:
            found = self._store.find(ids, scope, p0)
        except TowerdError as error:
            log.warning("rows were not read: %s", error.message)
        except Exception:
            log.exception("rows were not read")
        return StoredPrefix.nothing(p0) if found is None else found
