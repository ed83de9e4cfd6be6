"""MappedFiles: the files that this process has mapped, and what of them counts as its RAM.

What was read through a mapping counts as RAM of the process until the mapping ends, although the system's page cache
has it in any case. Where RAM is limited, it is given back while rows are still being read: the next read of the same bytes
finds them in the page cache.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from towerd.store.files.file_map import FileMap


class MappedFiles:
    """All mappings of a process. Thread-safe."""

    def __init__(self) -> None:
        self.bytes_max = 0
        """Bytes that may be read before they are given back; 0: they are given back when a mapping ends."""
        self._files: weakref.WeakSet[FileMap] = weakref.WeakSet()
        self._n_read = 0
        self._lock = threading.Lock()

    def add(self, data: FileMap) -> None:
        """A file was mapped, read-only."""
        with self._lock:
            self._files.add(data)

    def read(self, n_bytes: int) -> None:
        """So many bytes were read of some of them."""
        if not self.bytes_max:
            return
        with self._lock:
            self._n_read += n_bytes
            is_much = self._n_read >= self.bytes_max
        if is_much:
            self.give_back()

    def give_back(self) -> None:
        """Have what was read not count any more. Who reads on notices nothing."""
        with self._lock:
            self._n_read = 0
            files = list(self._files)
        for data in files:
            with suppress(ValueError, OSError):  # closed just now
                data.give_back()


MAPPED = MappedFiles()
"""Those of this process."""
