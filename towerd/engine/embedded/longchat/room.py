"""Room: how much of a chat may come back, in RAM and on disk.

    RAM     [ index of everything on the shelf ][ rows of the newest positions, and of live ones ]
    disk    [ rows of older ones, in a few files, the newest of which grows ]

What neither has room for is forgotten, the oldest first; of the disk a file at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from towerd.engine.embedded.longchat.keys import keys_of
from towerd.engine.embedded.longchat.live_set import BoundedSet
from towerd.engine.embedded.longchat.pages import PageFile
from towerd.engine.embedded.longchat.shelf import Chunk, Pages
from towerd.retention import Positions, Recalling
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows

log = logging.getLogger(__name__)

_STAYS_SHARE = 0.75
"""Of the positions that fit, those that are left when it was full."""
_FILES = 8
"""Files that a full disk has about: each stays open, and a daemon may open a thousand."""
_LAYOUT_LAYER_STEP = 4
"""Every so manieth layer's keys say which positions are similar."""


@dataclass(frozen=True, slots=True)
class Room:
    """The room of each chat of one engine."""

    layout: KVLayout
    head_size: int
    bytes_max: int
    """RAM for the rows and the index; those of its budget are always kept."""
    disk_bytes_max: int
    folder: Path
    """Of the files."""

    def n_max(self, retained: BoundedSet) -> int:
        """The most positions that a shelf has room for."""
        rows, index, least = self.layout.token_bytes, self._index_bytes(retained), retained.budget
        n_disk = self.disk_bytes_max // rows
        most = (self.bytes_max + rows * n_disk) // (rows + index)
        if n_disk:  # the index of what is on disk needs RAM, beside the rows of the budget
            most = min(most, (self.bytes_max - rows * least.tokens) // max(1, index))
        return max(least.tokens, most, self.bytes_max // (rows + index))

    def n_ram(self, retained: BoundedSet) -> int:
        """Of how many positions on its shelf the rows may be in RAM."""
        left = self.bytes_max - self._index_bytes(retained) * len(retained.shelf)
        return max(retained.budget.tokens, left // self.layout.token_bytes)

    def make(self, retained: BoundedSet) -> None:
        """Forget the oldest that is not live, if there is more than there is room for."""
        shelf, n_max = retained.shelf, self.n_max(retained)
        if len(shelf) > n_max:
            n_over = len(shelf) - max(int(_STAYS_SHARE * n_max), len(retained.kept))
            self.forget(retained, self._idle(shelf.positions, retained)[:n_over])

    def page_out(self, retained: BoundedSet) -> None:
        """Write the oldest rows that are not live to disk, if RAM has no room for them. All of them
        must be indexed."""
        in_ram, n_max = retained.shelf.in_ram, self.n_ram(retained)
        if len(in_ram) <= n_max or not self.disk_bytes_max:
            return
        n_live = int(np.isin(in_ram, retained.kept).sum())
        n_over = len(in_ram) - max(int(_STAYS_SHARE * n_max), n_live)
        going = self._idle(in_ram, retained)[: max(0, n_over)]
        n_fit = self.disk_bytes_max // self.layout.token_bytes
        self.forget(retained, going[: max(0, len(going) - n_fit)])
        going = going[max(0, len(going) - n_fit) :]
        if not len(going):
            return
        self._free_disk(retained, len(going) * self.layout.token_bytes)
        try:
            file = self._open_file(retained, len(going) * self.layout.token_bytes)
            pages = Pages.of(self._together(retained, going), self.folder, file)
        except OSError as error:
            log.warning("old rows of a long chat are forgotten", extra={"reason": str(error)})
            self.forget(retained, going)
            return
        stay = np.setdiff1d(retained.shelf.positions, going, assume_unique=True)
        retained.shelf = retained.shelf.only(stay).add(pages)

    def forget(self, retained: BoundedSet, gone: Positions) -> None:
        """Positions on a shelf can no longer come back."""
        if not len(gone):
            return
        policy, shelf = retained.policy, retained.shelf
        assert isinstance(policy, Recalling)
        policy.forget(gone)
        retained.shelf = shelf.only(np.setdiff1d(shelf.positions, gone, assume_unique=True))

    def lay_out(self, rows: KVRows, positions: Positions, numbers: Positions) -> Chunk:
        """Those of `rows`, similar ones side by side; `positions` of the chat are those of all."""
        from towerd.retention.layout import cluster_order

        keys = keys_of(rows, self.head_size, _LAYOUT_LAYER_STEP)
        return Chunk.of(rows, positions, numbers[cluster_order(keys[:, :, numbers])])

    def _together(self, retained: BoundedSet, positions: Positions) -> Chunk:
        rows = retained.shelf.rows(positions)
        return self.lay_out(rows, positions, np.arange(len(positions)))

    def _free_disk(self, retained: BoundedSet, n_bytes: int) -> None:
        """Forget files until there is room for so much."""
        while retained.shelf.disk_bytes + n_bytes > self.disk_bytes_max:
            oldest = retained.shelf.oldest_file()
            assert oldest is not None, "an empty disk has room"
            self.forget(retained, retained.shelf.filed(oldest))

    def _open_file(self, retained: BoundedSet, n_bytes: int) -> PageFile | None:
        """The newest file of a chat, if so much may be added to it."""
        file = retained.shelf.newest_file()
        if file is None or file.n_bytes + n_bytes > self.disk_bytes_max // _FILES:
            return None
        return file

    def _idle(self, positions: Positions, retained: BoundedSet) -> Positions:
        return np.setdiff1d(positions, retained.kept, assume_unique=True)

    def _index_bytes(self, retained: BoundedSet) -> int:
        assert isinstance(retained.policy, Recalling)
        n_kv = self.layout.k[0].n_elements // self.head_size
        return retained.policy.index_bytes(self.layout.n_layer, n_kv, self.head_size)
