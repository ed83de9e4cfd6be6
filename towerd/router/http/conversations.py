"""Conversations: which model has the stream of a client's `X-Conversation-Id`.

Such a stream outlives its client (`towerd.api.http.kept_stream`): a request that waits for its model
goes on waiting when its client leaves, and counts as running until it has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from towerd.errors import TowerdError
from towerd.router.http.request import RoutedRequest
from towerd.router.loading.model import RoutedModel

CONVERSATIONS_MAX = 4096
Key: TypeAlias = tuple[str, str]
"""A tenant's name and a conversation id."""
Opening: TypeAlias = "asyncio.Task[None]"


class Conversations:
    """The newest request of every conversation. Event loop only."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Key, tuple[RoutedRequest, Opening]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: Key, routed: RoutedRequest, opening: Opening) -> None:
        """Remember a request."""
        self._requests[key] = (routed, opening)
        self._requests.move_to_end(key)
        opening.add_done_callback(partial(self._opened, key))
        while len(self._requests) > CONVERSATIONS_MAX:
            self._requests.popitem(last=False)

    def _opened(self, key: Key, opening: Opening) -> None:
        """Forget a request that has no reply: it would be kept with its body."""
        if opening.cancelled() or opening.exception() is not None:
            if (found := self._requests.get(key)) is not None and found[1] is opening:
                del self._requests[key]

    def model_of(self, key: Key) -> RoutedModel | None:
        """The model whose process has the conversation."""
        found = self._requests.get(key)
        return None if found is None else found[0].model

    def is_waiting(self, key: Key) -> bool:
        """Whether its request still waits for the model."""
        found = self._requests.get(key)
        return found is not None and not found[1].done()

    def models_of(self, tenant: str) -> set[RoutedModel]:
        """The models that have conversations of a tenant."""
        return {
            routed.model for (whose, _), (routed, _) in self._requests.items() if whose == tenant
        }

    def stop(self, key: Key) -> None:
        """Forget a conversation; a request that still waits for its model ends."""
        found = self._requests.pop(key, None)
        if found is not None and not found[1].done():
            routed, opening = found
            routed.is_stopped = True
            opening.cancel()

    def finish(self, routed: RoutedRequest, opening: Opening) -> None:
        """Go on with a request whose client has left."""
        task = asyncio.create_task(_finish(routed, opening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _finish(routed: RoutedRequest, opening: Opening) -> None:
    with suppress(TowerdError, asyncio.CancelledError):
        await opening
        await routed.finish()
