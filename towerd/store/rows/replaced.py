"""Files whose rows are in other ones by now, until they may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from towerd.errors import StoreError
from towerd.store.segments.segment_file import SegmentFile
from towerd.store.state.state import StoreState

FileTest: TypeAlias = Callable[[SegmentFile], bool]
"""Whether a file may go."""


class ReplacedFiles:
    """The replaced files of one open store that are still on disk. Thread-safe. After a crash, they are
    files that the catalog does not list, which gc removes."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._names: set[str] = set()

    def add(self, files: Sequence[SegmentFile]) -> None:
        """Delete these files, and those that had to stay, as `remove` does."""
        with self._state.lock:
            self._names.update(file.path.name for file in files)
        self.remove()

    def remove(self) -> None:
        """Delete the files once the journal durably names the new ones: if the catalog is lost, it would
        name files that are gone, and no others. Until then they stay."""
        with self._state.lock:
            if not self._names:
                return
            try:
                self._state.catalog.sync_journal()
            except StoreError:
                return
            names, self._names = self._names, set()
        self._delete(names)

    def remove_all(self) -> None:
        """Delete the files whatever the journal says: they may have tokens of a deleted session."""
        with self._state.lock:
            names, self._names = self._names, set()
        self._delete(names)

    def _delete(self, names: set[str]) -> None:
        for name in names:
            self._state.directory.remove(name)
