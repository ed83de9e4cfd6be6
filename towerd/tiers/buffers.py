"""Reusable buffers for composed blobs: a fresh 64 MB allocation costs more in page faults than
the copy into it."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

_ROUND_BYTES = 1 << 20


class BufferPool:
    """Keeps at most `bytes_max` of idle buffers. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._idle: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def acquire(self, size: int) -> npt.NDArray[np.uint8]:
        """A uint8 buffer of at least `size` bytes; contents are arbitrary."""
        with self._lock:
            fitting = [b for b in self._idle if len(b) >= size]
            if fitting:
                best = min(reversed(fitting), key=len)  # the last one used: it may be in cache
                self._idle = [b for b in self._idle if b is not best]
                return best
        return _new(size)

    def warm_up(self, size: int, count: int) -> None:
        """Make `count` more buffers of `size` bytes on a separate thread and touch their pages, so
        that the first acquisitions cause no page faults."""
        threading.Thread(target=self._warm_up, args=(size, count), daemon=True).start()

    def _warm_up(self, size: int, count: int) -> None:
        for _ in range(count):
            buffer = _new(size)
            buffer.fill(0)
            self.release(buffer)

    def release(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give a buffer back; the largest ones are kept."""
        with self._lock:
            self._idle.append(buffer)
            self._idle.sort(key=len, reverse=True)
            while len(self._idle) > 1 and sum(map(len, self._idle)) > self._bytes_max:
                self._idle.pop()


def _new(size: int) -> npt.NDArray[np.uint8]:
    """A new buffer, whose pages are not touched."""
    return np.empty(-(-size // _ROUND_BYTES) * _ROUND_BYTES, np.uint8)
