"""BufferPool: memory that was touched before, for what is needed again and again for a moment.

A fresh 64 MB allocation costs more in page faults than the copy into it, or than decrypting into it.
"""

from __future__ import annotations

import threading
import weakref

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
        self._lock = threading.RLock()  # the collector may end a loan while it is held

    def acquire(self, size: int) -> Buffer:
        """A uint8 buffer of at least `size` bytes; contents are arbitrary."""
        with self._lock:
            fitting = [b for b in self._idle if len(b) >= size]
            if fitting:
                best = min(reversed(fitting), key=len)  # the last one used: it may be in cache
                self._idle = [b for b in self._idle if b is not best]
                return best
        return _new(size)

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
        with self._lock:
            self._idle.clear()

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back; the largest ones are kept."""
        with self._lock:
            self._idle.append(buffer)
            self._idle.sort(key=len, reverse=True)
            while len(self._idle) > 1 and sum(map(len, self._idle)) > self.bytes_max:
                self._idle.pop()


def _new(size: int) -> Buffer:
    """A new buffer, whose pages are not touched."""
    return np.empty(-(-size // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
