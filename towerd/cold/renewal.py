"""Renewal in idle time: blobs that need another table or model than new ones are coded again."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from towerd.errors import NotFound, ThawError
from towerd.store import Store
from towerd.store.catalog.probes import is_renewing, note_probe, note_renewed
from towerd.store.sessions.coded import CodedSession

if TYPE_CHECKING:
    from towerd.codec import Codec

log = logging.getLogger(__name__)

PAGE = 64
"""Sessions that are looked at under one lock."""


def check_minis(store: Store, codec: Codec) -> None:
    """Say so if llama.cpp cuts the vocabularies that texts are coded in otherwise than at the last
    start: a blob that follows a base was coded after the base's symbols. Then every session is due."""
    digest = store.state.identity.tokenizer_digest
    for mini in codec.minis():
        if note_probe(store, digest, mini.probe(), mini.hash(), mini.written()):
            log.warning(
                "this llama.cpp cuts the codec's vocabulary otherwise than the one of the last start: "
                "copies of conversations are coded again, and frozen ones that begin like others "
                "wait for a client that continues them"
            )


class Recoder(Protocol):
    """What codes the sessions; see `ColdTier`."""

    store: Store

    async def is_current(self, session: CodedSession) -> bool: ...

    async def recode(self, id: str, scope: str | None = None) -> bool: ...


class Renewal:
    """Goes over all sessions in coded form once per start: blobs that are written later are current."""

    def __init__(self, tier: Recoder) -> None:
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
            self._everything = await asyncio.to_thread(is_renewing, self._tier.store, self._digest)
        while not self._is_done:
            if not self._page:
                pages = self._tier.store.cold.coded
                self._page = await asyncio.to_thread(pages, self._after, PAGE)
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
            await asyncio.to_thread(note_renewed, self._tier.store, self._digest, self._n_text)
