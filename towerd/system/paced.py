"""PacedExecutor: background work in pieces, one at a time, at low priority, between requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from towerd.system.priority import lower_priority

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.02
"""How often it is asked whether requests have ended."""
PAUSE_S_MAX = 10.0
"""After so much waiting since `begin` work continues all the same: who waits for it has other things to do."""


class PacedExecutor(Executor):
    """Begins no piece of work while `is_quiet` says that requests need the machine."""

    def __init__(self) -> None:
        self.is_quiet: Callable[[], bool] = lambda: True
        self._left_s = 0.0
        """For how long work may still wait."""
        self._pool = ThreadPoolExecutor(1, "paced", initializer=lower_priority)

    def begin(self) -> None:
        """What comes is one job, which may wait anew."""
        self._left_s = PAUSE_S_MAX

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor.submit."""
        return self._pool.submit(lambda: self._run(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor.shutdown. What pauses continues at once."""
        self.is_quiet = lambda: True
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.pause()
        return fn(*args, **kwargs)

    def pause(self) -> None:
        """Wait here while requests need the machine; for long pieces, between their parts."""
        while self._left_s > 0 and not self.is_quiet():
            time.sleep(POLL_S)
            self._left_s -= POLL_S
