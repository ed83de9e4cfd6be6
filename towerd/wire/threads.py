"""The threads that parse requests and write replies off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from towerd.errors import Unavailable
from towerd.wire._wire import Model

P = ParamSpec("P")
T = TypeVar("T")

BYTES_QUICK_MAX = 64 * 1024
"""Longer bodies are parsed by threads of their own, so that others do not wait behind them."""
_THREADS = 2


class WireThreads:
    """A model, and the threads that work with it. Close it before the weights are freed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._quick = ThreadPoolExecutor(_THREADS, "towerd-wire")
        self._long = ThreadPoolExecutor(_THREADS, "towerd-wire-long")

    async def call(
        self, n_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work(...)`, which handles `n_bytes`. Raises Unavailable after `close()`."""
        pool = self._quick if n_bytes <= BYTES_QUICK_MAX else self._long
        try:
            running = pool.submit(work, *args, **kwargs)
        except RuntimeError:
            raise Unavailable("The server is shutting down") from None
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Wait until no work is running, and end the threads."""
        self._quick.shutdown()
        self._long.shutdown()
