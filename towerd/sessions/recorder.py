"""The single place that writes turns to the store, for every engine."""

from __future__ import annotations

import asyncio

from towerd.search.search import Search
from towerd.sessions.traffic import Traffic
from towerd.store import Store
from towerd.store.sessions.turn import Turn


class TurnRecorder:
    """Commits turns and reports them to the policies and workflows, and to the search."""

    def __init__(
        self, store: Store, traffic: Traffic | None = None, search: Search | None = None
    ) -> None:
        self._store = store
        self._traffic = traffic
        self._search = search

    async def record(self, turn: Turn, *, answered: bool = True) -> str:
        """Make a turn durable and return its session's id. Of a prompt without an answer, the
        cached tokens are kept for reuse, outside any session; the id is then "".

        Raises DiskFull or another StoreError."""
        if answered:
            return await asyncio.to_thread(self._commit, turn)
        if turn.n_cached:
            await asyncio.to_thread(self._keep_prompt, turn)
        return ""

    def _commit(self, turn: Turn) -> str:
        result = self._store.commit_turn(turn)
        if self._traffic is not None:
            self._traffic.recorded(turn, result.node, result.session_id)
        if self._search is not None:
            self._search.recorded(turn, result)
        return result.session_id

    def _keep_prompt(self, turn: Turn) -> None:
        path = self._store.insert(turn.prompt[: turn.n_cached], turn.scope, [turn.n_cached])
        if self._traffic is not None:
            self._traffic.kept(path[-1], turn.started_s)
