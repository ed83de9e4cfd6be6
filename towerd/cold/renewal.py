"""Renewal in idle time: blobs that need another table or model than new ones are coded again."""

from __future__ import annotations

import asyncio
from typing import Protocol

from towerd.store import Store
from towerd.store.sessions.coded import CodedSession

PAGE = 64
"""Sessions that are looked at under one lock."""


class Recoder(Protocol):
    """What codes the sessions; see `ColdTier`."""

    store: Store

    async def is_current(self, session: CodedSession) -> bool: ...


class Renewal:
    """Goes over all sessions in coded form once per start: blobs that are written later are current."""

    def __init__(self, tier: Recoder, *, tokenizer_changed: bool) -> None:
        """tokenizer_changed: every session is due, because text may be cut otherwise by now."""
        self._tier = tier
        self._everything = tokenizer_changed
        self._page: list[CodedSession] = []
        self._after = 0
        self.is_done = False

    async def next(self) -> CodedSession | None:
        """The next session that is due; None if all were looked at."""
        while not self.is_done:
            if not self._page:
                pages = self._tier.store.cold.coded
                self._page = await asyncio.to_thread(pages, self._after, PAGE)
                self.is_done = not self._page
                continue
            session = self._page.pop(0)
            self._after = session.pk
            if self._everything or not await self._tier.is_current(session):
                return session
        return None
