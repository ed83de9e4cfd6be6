"""Inbox: the commands of other threads for the inference thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Commands in the order they came. Any thread may put one; one thread takes and runs them."""

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """A future of what `work` returns or raises. If it is cancelled first, `work` is not
        run."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.put(run)
        return future
