"""Keeps requests that llama-server places itself away from slots that were just restored.

Between a restore and its request's launch a slot looks idle to llama-server, and an unpinned
request would take exactly that one. So the two kinds take turns.
"""

from __future__ import annotations

import asyncio


class Gate:
    """Any number of leases may be placing at once, or unpinned requests be launching, not both;
    an unpinned one that waits goes before leases that have not begun."""

    def __init__(self) -> None:
        self._n_placing = 0
        self._n_unpinned = 0
        self._nobody_places = asyncio.Event()
        self._nobody_places.set()
        self._may_place = asyncio.Event()
        self._may_place.set()

    @property
    def is_awaited(self) -> bool:
        """Whether an unpinned request waits for leases to be launched."""
        return self._n_unpinned > 0 and self._n_placing > 0

    async def begin_placing(self) -> None:
        """Wait until a lease may be placed. Every call needs one `end_placing`."""
        await self._may_place.wait()
        self._n_placing += 1
        self._nobody_places.clear()

    def end_placing(self) -> None:
        """The lease's request runs, or will not."""
        self._n_placing -= 1
        if self._n_placing == 0:
            self._nobody_places.set()

    async def begin_unpinned(self) -> None:
        """Wait until nothing is being placed. Every call needs one `end_unpinned`."""
        self._n_unpinned += 1
        self._may_place.clear()
        try:
            await self._nobody_places.wait()
        except BaseException:
            self.end_unpinned()
            raise

    def end_unpinned(self) -> None:
        """The unpinned request runs, or will not."""
        self._n_unpinned -= 1
        if self._n_unpinned == 0:
            self._may_place.set()
