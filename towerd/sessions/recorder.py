"""The single place that writes turns to the store, for every engine."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from towerd.errors import SessionDeleted, TowerdError
from towerd.model.speakers import system_tokens
from towerd.search.reading import TurnReader
from towerd.search.search import Search
from towerd.sessions.traffic import Traffic
from towerd.store import Store
from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.store.sessions.deletions import DeletionWatch
from towerd.store.sessions.turn import Turn

log = logging.getLogger(__name__)


class TurnRecorder:
    """Commits turns and reports them to the policies and workflows, and to the search."""

    def __init__(
        self, store: Store, traffic: Traffic | None = None, search: Search | None = None
    ) -> None:
        self._store = store
        self._traffic = traffic
        self._search = search
        self._vocabulary: KeptVocabulary | None = None

    def watch_deletions(self) -> DeletionWatch:
        """What is deleted from now on, for the turn of a request that begins."""
        return self._store.deletions.watch()

    async def check_room(self) -> None:
        """Raises DiskLimitReached if the disk that the store may take has no room for another turn."""
        if self._store.disk.bytes_max:
            await asyncio.to_thread(self._store.disk.check)

    async def record(self, turn: Turn, *, answered: bool = True) -> str:
        """Make a turn durable and return its session's id. Of a prompt without an answer, the
        cached tokens are kept for reuse, outside any session; the id is then "". Nothing is kept of
        a turn whose session was deleted while its request ran.

        Raises DiskFull or another StoreError."""
        try:
            if answered:
                return await asyncio.to_thread(self._commit, turn)
            if turn.n_cached:
                await asyncio.to_thread(self._keep_prompt, turn)
        except SessionDeleted:
            log.info("a turn was not recorded: its session was deleted while it was answered")
        return ""

    def _commit(self, turn: Turn) -> str:
        if self._search is not None and turn.agent is not None:
            turn = dataclasses.replace(turn, n_base=self._n_base(turn, self._search.reader))
        result = self._store.commit_turn(turn)
        if self._traffic is not None:
            self._traffic.recorded(turn, result.node, result.session_id)
        if self._search is not None:
            self._search.recorded(turn, result)
        return result.session_id

    def _n_base(self, turn: Turn, reader: TurnReader) -> int:
        """See `Turn.n_base`."""
        try:
            self._vocabulary = self._vocabulary or reader.own_vocabulary()
        except (TowerdError, OSError) as error:  # the turn is worth more
            log.debug("where a system prompt ends is not known", extra={"error": str(error)})
            return 0
        return system_tokens(turn.prompt, self._vocabulary)

    def _keep_prompt(self, turn: Turn) -> None:
        prompt, n = turn.prompt[: turn.n_cached], turn.n_cached
        path = self._store.insert(prompt, turn.scope, [n], turn.since)
        if self._traffic is not None:
            self._traffic.kept(path[-1], turn.started_s)
