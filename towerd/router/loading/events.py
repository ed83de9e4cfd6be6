"""ModelEvents: what GET /models/sse tells its listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WAITING_MAX = 1024
"""ModelEvents that a listener may be behind; then it is let go."""


class ModelEvents:
    """ModelEvents of all models, in llama-server's shapes."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[dict[str, Any] | None]] = set()

    @contextmanager
    def listen(self) -> Iterator[asyncio.Queue[dict[str, Any] | None]]:
        """A queue of the events from now on; None is its end."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(WAITING_MAX)
        self._listeners.add(queue)
        try:
            yield queue
        finally:
            self._listeners.discard(queue)

    def send(self, event: str, model: str, data: dict[str, Any] | None = None) -> None:
        """Tell all listeners."""
        said: dict[str, Any] = {"model": model, "event": event}
        if data is not None:
            said["data"] = data
        for queue in tuple(self._listeners):
            if queue.full():
                self._end(queue)
            else:
                queue.put_nowait(said)

    def close(self) -> None:
        """Let all listeners go."""
        for queue in tuple(self._listeners):
            self._end(queue)

    def _end(self, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        self._listeners.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)
