"""ModelEvents: what GET /models/sse tells its listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WAITING_MAX = 1024
"""ModelEvents that a listener may be behind; then it is let go."""
STAGE = "text_model"
"""The stage of loading that llama-server names; here it is all there is."""


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

    def begins(self, model: str) -> None:
        """A model is about to be loaded."""
        self.send("model_status", model, {"status": "loading"})
        self.progresses(model, 0.0)

    def has_loaded(self, model: str, info: dict[str, Any]) -> None:
        """A model is loaded. info: what GET /v1/models of its process says."""
        self.progresses(model, 1.0)
        self.send("status_change", model, {"status": "loaded", "info": info})

    def has_ended(self, model: str, exit_code: int) -> None:
        """The process of a model has ended, or did not come up."""
        self.send("status_change", model, {"status": "unloaded", "exit_code": exit_code})

    def progresses(self, model: str, value: float) -> None:
        """value: the share of its weights that is loaded, from 0 to 1."""
        progress = {"stages": [STAGE], "current": STAGE, "value": value}
        self.send("status_change", model, {"status": "loading", "progress": progress})

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
