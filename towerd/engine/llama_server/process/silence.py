"""SilenceWatch: notices that a process which should answer no longer does.

A process that is stopped (SIGSTOP) or hangs keeps its connections open, and accepts more: a request to it
would wait for ever. How long an answer takes says nothing, since a prompt may take minutes. So while
requests wait the process is asked for its health, which it answers whatever it computes, and the
system is asked whether it is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from towerd.engine.llama_server.process.client import ClientFailure
from towerd.errors import TowerdError
from towerd.system.process import is_stopped

LOOK_S = 1.0
ASK_S = 5.0
"""The pause between two questions for its health."""
STOPPED_S = 4.0
"""A process that is stopped for so long is silent. Who stops it for a moment loses no request."""
SILENT_S = 30.0
"""So is one that does not answer for its health for so long while requests wait."""
IS_STOPPED = "is stopped (SIGCONT continues it)"
IS_SILENT = "does not answer any more"


class SilenceWatch:
    """Watches one process. On the event loop."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        *,
        pid: Callable[[], int | None],
        is_busy: Callable[[], bool],
    ) -> None:
        """ask: returns when the process answers for its health; raises a TowerdError, or what `Client.send`
        does, if there is no answer to wait for. pid: None while the process is not known. is_busy:
        whether requests wait for it."""
        self._ask = ask
        self._pid = pid
        self._is_busy = is_busy

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped now."""
        pid = self._pid()
        return pid is not None and is_stopped(pid)

    async def until_silent(self) -> str:
        """Return once it is silent: why, as a part of a sentence."""
        loop = asyncio.get_running_loop()
        asking: asyncio.Task[bool] | None = None
        try:
            runs_s = asked_s = loop.time()
            while True:
                await asyncio.sleep(LOOK_S)
                now_s = loop.time()
                if not self.is_stopped:
                    runs_s = now_s
                elif now_s - runs_s >= STOPPED_S:
                    return IS_STOPPED
                if asking is not None and asking.done():
                    asking = None
                if asking is not None and now_s - asked_s >= SILENT_S:
                    return IS_SILENT
                if asking is None and self._is_busy() and now_s - asked_s >= ASK_S:
                    asking, asked_s = asyncio.create_task(self._has_answered()), now_s
        finally:
            if asking is not None:
                asking.cancel()

    async def until_answer(self) -> None:
        """Return once it answers again."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(TimeoutError):
                if not self.is_stopped and await asyncio.wait_for(self._has_answered(), SILENT_S):
                    return

    async def _has_answered(self) -> bool:
        """Wait for its answer; False if it failed, which is not silence."""
        try:
            await self._ask()
        except (ClientFailure, TowerdError):
            return False
        return True
