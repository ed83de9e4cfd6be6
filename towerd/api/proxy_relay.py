"""A stream's events on their way to the client, past the interpreter.

Where all cores decode, whatever is computed between two tokens delays the next one, and little of
it is still in the caches. So events that say no more than that the reply goes on pass from socket
to socket in a thread (`towerd.kernels.relay`); they are looked at when the thread comes back, with
the first event that says more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from aiohttp import hdrs, web

from towerd.api.proxy_watch import Dialect
from towerd.engine.llama_server.wire import Reply, own_descriptor
from towerd.kernels.relay import Marks, Relayed, relay

PASSED_BYTES_MAX = 32 * 1024
"""Before it is looked at: a hundred events, each taken apart in one step of the event loop."""
IN_VAIN_MAX = 8
"""Times in a row that the thread came back with nothing, after which it is not asked again."""
RELAYS_MAX = 16
"""With more streams a round of the loop has events of several, so that each costs less there."""
_OPENAI = Marks((b'"finish_reason":null',), (b'"finish_reason":"', b'"error":'))
_MARKS = {
    Dialect.NATIVE: Marks((b'"stop":false',), (b'"stop":true', b'"error":')),
    Dialect.COMPLETION: _OPENAI,
    Dialect.CHAT: _OPENAI,
    Dialect.RESPONSES: Marks((b'"type":"response.output_text.delta"',), (b'"error":',)),
    Dialect.MESSAGES: Marks((b'"type":"content_block_delta"',), (b'"error":',)),
}


class Relays:
    """Threads for as many streams at once as `RELAYS_MAX`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RELAYS_MAX, "towerd-relay")
        self._n_busy = 0

    @property
    def has_room(self) -> bool:
        return self._n_busy < RELAYS_MAX

    async def run(self, work: Callable[[], Relayed]) -> Relayed:
        """In a thread; while there is room, at once."""
        self._n_busy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._n_busy -= 1

    def close(self) -> None:
        """When all have ended."""
        self._threads.shutdown()


class Relay:
    """Of one reply to one prepared response. `pass_on` between two reads; `end` it if that was
    cancelled."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        reply: Reply,
        dialect: Dialect,
        see: Callable[[bytes], None],
    ) -> None:
        """see: told what went out"""
        self._request = request
        self._reply = reply
        self._see = see
        self._pass = partial(
            relay,
            marks=_MARKS[dialect],
            bytes_max=PASSED_BYTES_MAX,
            is_chunked=response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked",
        )
        self._passing: asyncio.Task[bool] | None = None
        self._stop = ExitStack()
        """What ends the thread's work, closed."""
        self._is_ended = False
        self._n_in_vain = 0

    async def pass_on(self, relays: Relays) -> bool:
        """Let pass what may, but not for ever, and whether anything did; the rest is for
        `Reply.read` then."""
        if self._n_in_vain >= IN_VAIN_MAX or not relays.has_room or not self._reply.lend():
            return False
        self._passing = asyncio.create_task(self._run(relays))
        return await asyncio.shield(self._passing)

    async def end(self) -> None:
        """The client left."""
        self._is_ended = True
        self._stop.close()
        if self._passing is not None:
            await asyncio.wait((self._passing,))

    async def _run(self, relays: Relays) -> bool:
        """Begins in the next round of the loop: what was written has left, or waits for its client."""
        found, transport = Relayed(b"", b"", b""), self._request.transport
        # Others may have begun in the same round: without a thread at once, it would wait for theirs.
        if transport is not None and relays.has_room and self._can_begin(transport):
            with ExitStack() as ours, self._stop:
                ends = self._open(ours, transport)
                if ends is not None:
                    found = await relays.run(partial(self._pass, *ends))
            self._n_in_vain = 0 if found.passed else self._n_in_vain + 1
            self._see(found.passed)
            if found.unsent and not transport.is_closing():
                transport.write(found.unsent)
        self._reply.take_back(found.rest)
        return bool(found.passed)

    def _can_begin(self, transport: asyncio.Transport) -> bool:
        """Whether its client is there and has nothing to wait for."""
        return not self._is_ended and not transport.get_write_buffer_size()

    def _open(self, ours: ExitStack, transport: asyncio.Transport) -> tuple[int, int, int] | None:
        """Descriptors of both connections and of what ends the work; None if one cannot be had."""
        try:
            stopped, stop = os.pipe()
            ours.callback(os.close, stopped)
            self._stop.callback(os.close, stop)
            if (down := own_descriptor(transport)) is None:
                return None
            ours.callback(os.close, down)
            if (up := self._reply.own_descriptor()) is None:
                return None
        except OSError:  # the process has as many as it may
            return None
        ours.callback(os.close, up)
        return up, down, stopped
