"""Freezing by itself: what idle time does with sessions that are unused.

A session that was unused for some time gets a copy in coded form, verified, beside its rows. Its rows
leave when their space is needed, never before; once they have left, the session is frozen from its
copy, so that no token ids are kept as they are. When no session is due, blobs are renewed (`renewal`), also
where sessions are not frozen by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from towerd.cold.backoff import Backoff
from towerd.cold.freezing import FreezeResult
from towerd.cold.renewal import Renewal
from towerd.errors import DiskFull, NotFound, NotSupported
from towerd.store import Node, Store
from towerd.store.sessions.frozen import SessionBusy
from towerd.store.sessions.idle import START, IdleSession

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""It starts when no request has run for this long."""
POLL_S_MAX = 60.0
POLL_S_MIN = 0.05
RETRY_S = 3600.0
"""Time until a session that could not be coded is tried again."""
PAGE = 256
"""Sessions that are listed at a time."""


class SessionCoder(Protocol):
    """What codes the sessions; see `ColdTier`."""

    store: Store
    backoff: Backoff

    def idle_s(self) -> float: ...

    async def warm_up(self) -> None: ...

    async def write_copy(self, id: str, scope: str) -> bool: ...

    async def freeze(
        self, id: str, scope: str | None = None, *, only_without_rows: bool = False
    ) -> FreezeResult | None: ...


class IdleFreezer:
    """Looks at the unused sessions again and again, the least recently used first, and codes one at
    a time. Belongs to the event loop."""

    def __init__(
        self,
        tier: SessionCoder,
        after_s: float,
        has_rows: Callable[[Node], bool],
        clock: Callable[[], float],
        renewal: Renewal,
    ) -> None:
        """after_s: how long a session must be unused; -1: none is coded, but blobs are renewed."""
        self._tier = tier
        self._after_s = after_s
        self._has_rows = has_rows
        self._clock = clock
        self._renewal = renewal
        self._place = START

    async def run(self) -> None:
        """Code sessions while nothing else runs, until cancelled."""
        if not self._tier.store.cold.is_empty:
            await self._tier.warm_up()
        codes = self._after_s >= 0
        rest_s = min(POLL_S_MAX, max(POLL_S_MIN, self._after_s / 4)) if codes else POLL_S_MAX
        while True:
            has_more, began = False, time.monotonic()
            try:
                if self._is_idle():
                    has_more = (codes and await self._step()) or await self._renew()
            except Exception as error:  # the next poll tries again
                log.warning("no session was coded", extra={"error": str(error)})
            # at most half of a core's time
            pause_s = max(POLL_S_MIN, time.monotonic() - began)
            await asyncio.sleep(pause_s if has_more else rest_s)

    def _is_idle(self) -> bool:
        after_s = self._after_s if self._after_s >= 0 else QUIET_S
        return self._tier.idle_s() >= min(QUIET_S, max(POLL_S_MIN, after_s))

    async def _step(self) -> bool:
        """Code the next session that is due; False if all were looked at."""
        before = self._clock() - self._after_s
        pages = self._tier.store.cold.page
        page = await asyncio.to_thread(pages, before, self._place, PAGE, self._has_rows)
        passed_over = self._tier.backoff.active()
        for session in page:
            self._place = session.place
            is_due = not session.has_copy or not session.has_rows
            if is_due and (session.scope, session.id) not in passed_over:
                await self._code(session)
                return True
        if len(page) < PAGE:
            self._place = START
        return len(page) == PAGE

    async def _renew(self) -> bool:
        """Code the next session again whose blob is to be renewed; False if there is none."""
        if self._tier.store.cold.is_empty:
            return False
        try:
            session = await self._renewal.next()
        except NotSupported as error:
            log.warning("no session can be renewed now", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)
            return False
        if session is not None:
            await self._try(session.id, session.scope, self._renewal.renew(session))
        return session is not None

    async def _code(self, session: IdleSession) -> None:
        """Write the copy of a session, or freeze it if it has a copy and no rows."""
        id, scope = session.id, session.scope
        if not session.has_copy:
            await self._try(id, scope, self._tier.write_copy(id, scope))
        else:
            await self._try(id, scope, self._tier.freeze(id, scope, only_without_rows=True))

    async def _try(self, id: str, scope: str, work: Awaitable[Any]) -> None:
        try:
            await work
        except NotFound:
            pass  # removed meanwhile
        except SessionBusy:  # used or evaluated meanwhile
            self._tier.backoff.delay((scope, id), POLL_S_MAX)
        except (NotSupported, DiskFull) as error:  # the next session would fail the same way
            log.warning("no session can be coded now", extra={"error": str(error)})
            # freezing is what gives a full disk space, so it is not put off for long
            await asyncio.sleep(POLL_S_MAX if isinstance(error, DiskFull) else RETRY_S)
        except Exception as error:  # no failure may hold up the next session
            self._tier.backoff.delay((scope, id), RETRY_S)
            log.warning("a session was not coded", extra={"error": str(error)})
