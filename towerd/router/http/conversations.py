"""Conversations: which model has the stream of a client's `X-Conversation-Id`.

Such a stream outlives its client (`towerd.api.http.kept_stream`): a request that waits for its model
goes on waiting when its client leaves, and counts as running until it has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TypeAlias

from towerd.errors import TowerdError
from towerd.router.http.visit import Visit
from towerd.router.loading.model import RoutedModel

CONVERSATIONS_MAX = 4096
Key: TypeAlias = tuple[str, str]
"""A tenant's name and a conversation id."""
Opening: TypeAlias = "asyncio.Task[None]"


class Conversations:
    """The newest request of every conversation. Event loop only."""

    def __init__(self) -> None:
        self._visits: OrderedDict[Key, tuple[Visit, Opening]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key, visit: Visit, opening: Opening) -> None:
        """Remember a request."""
        self._visits[key] = (visit, opening)
        self._visits.move_to_end(key)
        while len(self._visits) > CONVERSATIONS_MAX:
            self._visits.popitem(last=False)

    def model_of(self, key: Key) -> RoutedModel | None:
        """The model whose process has the conversation."""
        found = self._visits.get(key)
        return None if found is None else found[0].model

    def is_waiting(self, key: Key) -> bool:
        """Whether its request still waits for the model."""
        found = self._visits.get(key)
        return found is not None and not found[1].done()

    def models_of(self, tenant: str) -> set[RoutedModel]:
        """The models that have conversations of a tenant."""
        return {visit.model for (whose, _), (visit, _) in self._visits.items() if whose == tenant}

    def stop(self, key: Key) -> None:
        """Forget a conversation; a request that still waits for its model ends."""
        found = self._visits.pop(key, None)
        if found is not None and not found[1].done():
            visit, opening = found
            visit.is_stopped = True
            opening.cancel()

    def finish(self, visit: Visit, opening: Opening) -> None:
        """Go on with a request whose client has left."""
        task = asyncio.create_task(_finish(visit, opening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _finish(visit: Visit, opening: Opening) -> None:
    with suppress(TowerdError, asyncio.CancelledError):
        await opening
        await visit.finish()
