"""LaunchGate: keeps requests that llama-server places itself out of slots just restored.

Between a restore and its request's launch a slot looks idle to llama-server, and an unpinned
request would take exactly that one. So the two kinds take turns.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque


class _Kind(enum.Enum):
    PLACING = 0
    UNPINNED = 1


class LaunchGate:
    """Any number of requests may be placed, or unpinned ones launching, at once, but not both.
    Those that wait go before all that come later, so that neither kind can starve the other."""

    def __init__(self) -> None:
        self._n_inside = dict.fromkeys(_Kind, 0)
        self._waiting: deque[tuple[_Kind, asyncio.Future[None]]] = deque()

    @property
    def is_awaited(self) -> bool:
        """Whether an unpinned request waits for others to be launched."""
        return self._n_inside[_Kind.PLACING] > 0 and bool(self._waiting)

    async def begin_placing(self) -> None:
        """Wait until a request may be placed. Every call needs one `end_placing`."""
        await self._enter(_Kind.PLACING)

    def end_placing(self) -> None:
        """Called when a placed request runs, or will not."""
        self._leave(_Kind.PLACING)

    async def begin_unpinned(self) -> None:
        """Wait until nothing is being placed. Every call needs one `end_unpinned`."""
        await self._enter(_Kind.UNPINNED)

    def end_unpinned(self) -> None:
        """Called when the unpinned request runs, or will not."""
        self._leave(_Kind.UNPINNED)

    def _can_enter(self, kind: _Kind) -> bool:
        return not any(n for other, n in self._n_inside.items() if other is not kind)

    async def _enter(self, kind: _Kind) -> None:
        if not self._waiting and self._can_enter(kind):
            self._n_inside[kind] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # those behind may have waited for this one alone
            else:
                self._leave(kind)
            raise

    def _leave(self, kind: _Kind) -> None:
        self._n_inside[kind] -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            kind, turn = self._waiting[0]
            if not turn.done():
                if not self._can_enter(kind):
                    return
                self._n_inside[kind] += 1
                turn.set_result(None)
            self._waiting.popleft()
