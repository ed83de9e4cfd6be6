"""BufferPool: memory that was touched before, for what is needed again and again for a moment.

A fresh 64 MB allocation costs more in page faults than the copy into it, or than decrypting into it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

BYTES_MAX = 68 << 20
_ROUND_BYTES = 1 << 20
Buffer = npt.NDArray[np.uint8]


class BufferPool:
    """Reusable buffers. Thread-safe."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        """Bytes of idle buffers that are kept."""
        self._idle: list[Buffer] = []
        self._returned: deque[Buffer] = deque()
        """On their way to `_idle`: the collector may end a loan anywhere, also where this thread changes that list."""
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Buffer:
        """A uint8 buffer of at least `size` bytes; contents are arbitrary."""
        self._take_back()
        with self._lock:
            # The last one used, since it may be in cache.
            best = min(self._fitting(size), key=lambda i: len(self._idle[i]), default=None)
            found = None if best is None else self._idle.pop(best)
        self._take_back()
        return _new(size) if found is None else found

    def lend(self, size: int) -> Buffer:
        """A buffer of exactly `size` bytes that is released when no view of it is left."""
        buffer = self.acquire(size)
        lent = np.frombuffer(buffer.data, np.uint8, size)  # views have this one as their base
        weakref.finalize(lent, self.release, buffer).atexit = False
        return lent

    def warm_up(self, size: int, count: int) -> None:
        """Make `count` more buffers of `size` bytes on a separate thread and touch their pages, so
        that the first acquisitions cause no page faults."""
        threading.Thread(target=self._warm_up, args=(size, count), daemon=True).start()

    def _warm_up(self, size: int, count: int) -> None:
        for _ in range(count):
            buffer = _new(size)
            buffer.fill(0)
            self.release(buffer)

    def clear(self) -> None:
        """Free the idle ones."""
        self._take_back()
        with self._lock:
            self._idle.clear()
        self._take_back()

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back; the largest ones are kept. Never waits: the collector calls it as well."""
        self._returned.append(buffer)
        self._take_back()

    def _fitting(self, size: int) -> list[int]:
        """Where in the list idle ones are that are large enough, the last one first."""
        return [i for i in reversed(range(len(self._idle))) if len(self._idle[i]) >= size]

    def _take_back(self) -> None:
        """Whoever holds the lock does it when it gives that back."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._idle.append(self._returned.popleft())
                self._idle.sort(key=len, reverse=True)
                while len(self._idle) > 1 and sum(map(len, self._idle)) > self.bytes_max:
                    self._idle.pop()
            finally:
                self._lock.release()


def _new(size: int) -> Buffer:
    """A new buffer, whose pages are not touched."""
    return np.empty(-(-size // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
