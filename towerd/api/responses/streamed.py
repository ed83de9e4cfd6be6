"""Responses that are streamed: a request that continues one waits until it is kept.

A client may leave a stream and at once continue what it read of it. That the client left is noticed a moment later,
and then what was generated is recorded. A request that came in between would not find the response, or would be put
before it in its conversation.

A process knows the responses that it streams itself. Behind a router, another model's process may have the response;
a request that does not find it there looks again for a moment (`LOOK_S_MAX`). The processes share the catalog alone,
and to tell each other of every stream would cost each of them messages that next to none needs. A conversation is
waited for where the same model continues it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from aiohttp import web

NOTICE_S_MAX = 2.0
"""How long it is waited for that a client is noticed to have left."""
KEEP_S_MAX = 10.0
"""How long it is then waited for that its response is kept."""
LOOK_S_MAX = 2.0
"""How long a response of another process is looked for."""
LOOK_S = 0.05
"""The pause between two looks."""


class StreamedResponses:
    """Those of all tenants that are streamed or about to be kept. Event loop only."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], set[StreamedResponse]] = {}

    def enter(self, tenant: str, names: Iterable[str]) -> StreamedResponse:
        """A stream begins. names: of its responses, and of their conversation."""
        made = StreamedResponse(self, tuple((tenant, name) for name in names))
        for key in made.keys:
            self._by_name.setdefault(key, set()).add(made)
        return made

    def leave(self, one: StreamedResponse) -> None:
        """See `StreamedResponse.end`."""
        for key in one.keys:
            others = self._by_name.get(key, set())
            others.discard(one)
            if not others:
                self._by_name.pop(key, None)

    async def wait(self, tenant: str, name: str) -> None:
        """Wait until a response, or those in a conversation, are kept if their clients leave about now."""
        for one in tuple(self._by_name.get((tenant, name), ())):
            with suppress(TimeoutError):
                await one.wait()


class StreamedResponse:
    """One stream."""

    def __init__(self, all_of_them: StreamedResponses, keys: tuple[tuple[str, str], ...]) -> None:
        self.keys = keys
        """The tenant with each name."""
        self._all = all_of_them
        self._has_left = asyncio.Event()
        self._has_ended = asyncio.Event()

    def left(self) -> None:
        """It is not streamed any more."""
        self._has_left.set()

    def end(self) -> None:
        """It is kept, or will not be."""
        self._has_left.set()
        self._has_ended.set()
        self._all.leave(self)

    async def wait(self) -> None:
        """Wait for its end. Raises TimeoutError if its client stays, or it takes too long."""
        async with asyncio.timeout(NOTICE_S_MAX):
            await self._has_left.wait()
        async with asyncio.timeout(KEEP_S_MAX):
            await self._has_ended.wait()


STREAMED: web.AppKey[StreamedResponses] = web.AppKey("streamed")
