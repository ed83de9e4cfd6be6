"""Freezing by itself: what idle time does with sessions that are unused.

A session that was unused for some time gets a copy in coded form, verified, beside its rows. Its rows
leave when their space is needed, never before; once they have left, the session is frozen from its
copy, so that no token ids are kept as they are. When no session is due, blobs are renewed (`Renewal`), also
where sessions are not frozen by themselves, and so are those that follow a base that was removed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from towerd.cold.cold_tier import ColdTier
from towerd.errors import DiskFull, NotFound, NotSupported, ThawError
from towerd.store.sessions.cold import START, IdleSession
from towerd.store.sessions.frozen import CodedSession, SessionBusy
from towerd.store.state.probes import is_renewing, note_renewed

log = logging.getLogger(__name__)

RENEWAL_PAGE = 64
"""Sessions that are looked at under one lock."""
QUIET_S = 5.0
"""It starts when no request has run for this long."""
POLL_S_MAX = 60.0
POLL_S_MIN = 0.05
RETRY_S = 3600.0
"""Time until a session that could not be coded is tried again."""
PAGE = 256
"""Sessions that are listed at a time."""


class Renewal:
    """Goes over all sessions in coded form once per start: blobs that are written later are current."""

    def __init__(self, tier: ColdTier) -> None:
        """If text may be cut otherwise since the last start, every session is due."""
        self._tier = tier
        self._digest = tier.store.state.identity.tokenizer_digest
        self._everything: bool | None = None
        self._page: list[CodedSession] = []
        self._after = self._n_text = self._n_failed = 0
        self._is_done = False

    async def next(self) -> CodedSession | None:
        """The next session that is due; None if all were looked at. Raises NotSupported."""
        if self._everything is None:
            self._everything = await asyncio.to_thread(
                is_renewing, self._tier.store.state, self._digest
            )
        while not self._is_done:
            if not self._page:
                pages = self._tier.store.cold.coded
                self._page = await asyncio.to_thread(pages, self._after, RENEWAL_PAGE)
                if not self._page:
                    await self._finish()
                continue
            session = self._page[0]
            is_due = self._everything or not await self._tier.is_current(session)
            del self._page[0]
            self._after = session.pk
            if is_due:
                return session
        return None

    async def renew(self, session: CodedSession) -> None:
        """Code a session again. Raises as `ColdTier.recode`."""
        try:
            await self._tier.recode(session.id, session.scope)
        except NotFound:
            pass  # removed meanwhile
        except ThawError:
            self._n_text += 1
            raise
        except Exception:
            self._n_failed += 1
            raise

    async def _finish(self) -> None:
        self._is_done = True
        if self._everything and not self._n_failed:
            await asyncio.to_thread(
                note_renewed, self._tier.store.state, self._digest, self._n_text
            )


class IdleFreezer:
    """Looks at the unused sessions again and again, the least recently used first, and codes one at
    a time. Belongs to the event loop."""

    def __init__(self, tier: ColdTier, may_run: Callable[[], bool] = lambda: True) -> None:
        """Blobs are renewed also where no session is coded by itself. may_run: asked before each session"""
        self._tier = tier
        self._may_run = may_run
        self._after_s = tier.freeze_after_s
        self._renewal = Renewal(tier)
        self._strays: list[tuple[str, str]] = []
        self._strays_due = math.inf
        """time.monotonic() at which they are looked for again."""
        self._bases_version = -1
        self._place = START
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to code sessions while nothing else runs."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop; the tier may go on to be used."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        if not self._tier.store.cold.is_empty:
            await self._tier.warm_up()
        codes = self._after_s >= 0
        rest_s = min(POLL_S_MAX, max(POLL_S_MIN, self._after_s / 4)) if codes else POLL_S_MAX
        while True:
            has_more, began = False, time.monotonic()
            try:
                if self._is_idle() and self._may_run():
                    has_more = await self._free_base() or codes and await self._step()
                    has_more = has_more or await self._renew()
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
        before = self._tier.clock() - self._after_s
        pages = self._tier.store.cold.page
        page = await asyncio.to_thread(pages, before, self._place, PAGE, self._tier.has_rows)
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

    async def _free_base(self) -> bool:
        """Code the next session again that keeps the tokens of a removed base; False if there is none."""
        store = self._tier.store
        is_due = self._bases_version != store.bases.version or time.monotonic() >= self._strays_due
        if not self._strays and is_due:
            self._bases_version = store.bases.version
            self._strays = await asyncio.to_thread(store.cold.alike.strays)
            # One may fail, or come meanwhile.
            self._strays_due = time.monotonic() + RETRY_S if self._strays else math.inf
        if not self._strays:
            return False
        id, scope = self._strays.pop()
        await self._try(id, scope, self._tier.recode(id, scope))
        return True

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
