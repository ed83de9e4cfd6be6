"""Checks, while a service runs, that its model's file is still what was loaded.

Weights are mapped from the file, so a write to it changes the model that stored rows belong to. The
thread here looks at the file every few seconds, and an engine may before each request. A file that
looks different is sampled at once. If only a time differs, or the file was not read for a day, it is read in full while the service is
idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from towerd.errors import TowerdError
from towerd.model.model_file import Memo, ModelFile
from towerd.system.priority import lower_priority

log = logging.getLogger(__name__)

LOOK_S = 5.0
IDLE_S = 60.0
"""How long no request must have run before a file is read."""
EVERY_S = 86_400.0
BUSY_S = 0.2


class _CheckStopped(Exception):
    """The daemon closes."""


class WeightsCheck:
    """`start` it once, `close` it before the files, the store and the engine."""

    def __init__(
        self,
        files: Sequence[ModelFile],
        memo: Memo,
        *,
        is_busy: Callable[[], bool],
        on_change: Callable[[float], None],
        follow: bool = False,
        look_s: float = LOOK_S,
        idle_s: float = IDLE_S,
        every_s: float = EVERY_S,
    ) -> None:
        """files: identified, and owned by the caller
        is_busy: whether a request runs; called by the thread
        on_change: called once, with the Unix time at which the file was last known to be right
        follow: check the file that the path leads to, as for a server that may load it again
        """
        self._files = list(files)
        self._alike_at = dict.fromkeys(self._files, time.time())
        """The last time at which each file looked as when it was identified."""
        self._memo = memo
        self._is_busy = is_busy
        self._on_change = on_change
        self._follow = follow
        self._look_s = look_s
        self._idle_s = idle_s
        self._every_s = every_s
        self._busy_at = self._part_at = time.monotonic()
        self._has_changed = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="towerd-weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; a file that is being read will be read another time."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Look at the files now: microseconds, or milliseconds where one looks different. May be
        called by any thread that has not locked the store."""
        for file in self._files:
            try:
                if self._follow and not file.is_in_place():
                    file.reopen()
                if file.state() == file.known.state:
                    self._alike_at[file] = time.time()
                elif file.sample() != file.known.sample:
                    self._changed(file, self._alike_at[file])
            except OSError:
                continue  # the file is being replaced

    def _run(self) -> None:
        lower_priority()
        while not self._stop.wait(self._look_s) and not self._has_changed:
            if self._is_busy():
                self._busy_at = time.monotonic()
            self.look()
            try:
                for file in self._files:
                    if self._is_due(file):
                        self._read(file)
            except _CheckStopped:
                return
            except (OSError, TowerdError) as error:
                log.warning("the model's file cannot be checked", extra={"error": str(error)})

    def _is_due(self, file: ModelFile) -> bool:
        """Whether to read all of it now."""
        if self._has_changed or time.monotonic() - self._busy_at < self._idle_s:
            return False
        is_young = 0 <= time.time() - file.known.verified < self._every_s
        return not is_young or file.state() != file.known.state

    def _read(self, file: ModelFile) -> None:
        state, sample = file.state(), file.sample()
        self._part_at = time.monotonic()
        if file.hash(self._give_way) == file.known.hash:
            file.verified(self._memo, state, sample)
        elif state == file.known.state:
            self._changed(file, file.known.verified)
        else:
            self._changed(file, self._alike_at[file])

    def _give_way(self) -> None:
        """Between two parts of a file: use half of a core at most, and none beside requests."""
        self._stop.wait(min(time.monotonic() - self._part_at, 1.0))
        while self._is_busy() and not self._stop.is_set():
            self._stop.wait(BUSY_S)
        if self._stop.is_set():
            raise _CheckStopped
        self._part_at = time.monotonic()

    def _changed(self, file: ModelFile, since: float) -> None:
        with self._lock:  # whoever looks meanwhile waits until rows are void
            if self._has_changed:
                return
            self._has_changed = True
            log.error(
                "the model's file is not what was loaded, so stored rows are neither read nor "
                "written any more: put the right file there and start the server again",
                extra={"path": str(file.path)},
            )
            try:
                self._on_change(since)
            except Exception:
                log.exception("what was stored may still be used")
            try:
                file.forget(self._memo)
            except Exception:
                log.exception("the hash of the old file is still remembered")
