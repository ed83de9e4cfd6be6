"""What other threads want of the inference thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Inbox(queue.SimpleQueue[Callable[[], None]]):
    """Commands in the order they came. Anybody may put one; one thread takes and runs them."""

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """What `work` will return or raise. If whoever asked leaves before, it is not run."""
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
