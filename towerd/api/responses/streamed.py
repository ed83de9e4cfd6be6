"""Responses that are streamed, or made in a conversation: a request that continues one waits until it is kept.

A client may leave a stream and at once continue what it read of it. That the client left is noticed a moment later,
and then what was generated is recorded. A request that came in between would not find the response, or would be put
before it in its conversation. The same is true of a whole reply in a conversation, if its client leaves while it is
being kept.

A process knows the responses that it makes itself. Behind a router, another model's process may have the response;
a request that does not find it there looks again for a moment (`LOOK_S_MAX`). The processes share the catalog alone,
and to tell each other of every stream would cost each of them messages that next to none needs. A conversation is
waited for where the same model continues it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from aiohttp import web

from towerd.errors import NotFound

NOTICE_S_MAX = 2.0
"""How long it is waited for that a client is noticed to have left."""
KEEP_S_MAX = 10.0
"""How long it is then waited for that its response is kept."""
LOOK_S_MAX = 2.0
"""How long a response of another process is looked for."""
LOOK_S = 0.05
"""The pause after the first look; each later one is twice as long."""
Found = TypeVar("Found")


class StreamedResponses:
    """Those of all tenants that are streamed or about to be kept. Event loop only."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], set[StreamedResponse]] = {}

    def enter(self, tenant: str, names: Iterable[str]) -> StreamedResponse:
        """A request begins. names: of its responses, and of their conversation."""
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

    async def wait(self, tenant: str, name: str) -> bool:
        """Wait until a response, or those in a conversation, are kept if their clients leave about now: for all of them
        at once. Returns whether there were any."""
        waits = [one.wait() for one in self._by_name.get((tenant, name), ())]
        await asyncio.gather(*waits, return_exceptions=True)
        return bool(waits)

    async def find(
        self, tenant: str, id: str, look: Callable[[], Awaitable[Found]], *, look_s: float = 0.0
    ) -> Found:
        """What `look` finds of a response. It raises NotFound before the response is kept, which is then waited for.
        look_s: how long it is looked for again if it is not made here. Raises what the last look raises."""
        with suppress(NotFound):
            return await look()
        if await self.wait(tenant, id):
            look_s = 0.0
        loop, pause_s = asyncio.get_running_loop(), LOOK_S
        until_s = loop.time() + look_s
        while True:  # once in any case: it may have been kept during the first look
            try:
                return await look()
            except NotFound:
                left_s = until_s - loop.time()
                if left_s <= 0:
                    raise
            await asyncio.sleep(min(pause_s, left_s))
            pause_s *= 2


class StreamedResponse:
    """One request, which may make several."""

    def __init__(self, all_of_them: StreamedResponses, keys: tuple[tuple[str, str], ...]) -> None:
        self.keys = keys
        """The tenant with each name."""
        self._all = all_of_them
        self._has_stopped = asyncio.Event()
        self._has_ended = asyncio.Event()

    def stopped(self) -> None:
        """It is not generated or sent any more, but not kept yet."""
        self._has_stopped.set()

    def end(self) -> None:
        """It is kept, or will not be."""
        self._has_stopped.set()
        self._has_ended.set()
        self._all.leave(self)

    async def wait(self) -> None:
        """Wait for its end. Raises TimeoutError if its client stays, or it takes too long."""
        async with asyncio.timeout(NOTICE_S_MAX):
            await self._has_stopped.wait()
        async with asyncio.timeout(KEEP_S_MAX):
            await self._has_ended.wait()


STREAMED: web.AppKey[StreamedResponses] = web.AppKey("streamed")
