"""What a process takes of the RAM, looked at from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

LOOK_S = 0.005
CHILDREN_S = 0.1


class Watched:
    """The most that a process and its children took."""

    peak = 0
    """Bytes."""


@contextmanager
def watched(pid: int) -> Iterator[Watched]:
    """Look at a process again and again in the block."""
    found, over = Watched(), threading.Event()
    thread = threading.Thread(target=_look, args=(psutil.Process(pid), found, over), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _look(process: psutil.Process, found: Watched, over: threading.Event) -> None:
    children: list[psutil.Process] = []
    due_s = 0.0
    while not over.wait(LOOK_S):
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + CHILDREN_S
            with suppress(psutil.Error):
                children = process.children(recursive=True)
        found.peak = max(found.peak, sum(map(_rss, (process, *children))))


def _rss(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
