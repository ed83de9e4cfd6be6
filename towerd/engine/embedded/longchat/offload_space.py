"""OffloadSpace: limits the offloaded rows of a chat, in RAM and on disk.

    RAM     [ index of everything offloaded ][ rows of the newest positions, and of live ones ]
    disk    [ rows of older ones, in a few files, of which the newest grows ]

If both are full the oldest rows are forgotten; on disk a file at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from towerd.engine.embedded.live.live_set import BoundedSet
from towerd.engine.embedded.live.offloaded_rows import Pages, RowChunk, keys_of
from towerd.engine.embedded.live.pages import PageFile
from towerd.retention import Positions, Recalling
from towerd.slots.layout import KVLayout
from towerd.slots.rows import KVRows
from towerd.store.files.writes import DailyWrites

log = logging.getLogger(__name__)

_STAYS_SHARE = 0.75
"""Share of the positions that fit which is left after a full space was cleared."""
_FILES = 8
"""About how many files fill the disk limit: each stays open, and a daemon may open a thousand."""
_LAYOUT_LAYER_STEP = 4
"""The keys of every fourth layer decide which positions are similar."""


@dataclass(frozen=True, slots=True)
class OffloadSpace:
    """The limits of each chat of one engine."""

    layout: KVLayout
    head_size: int
    bytes_max: int
    """RAM for the rows and the index; the rows of the budget are always kept."""
    disk_bytes_max: int
    folder: Path
    """Where the files are made."""
    writes: DailyWrites
    """Counts what is written, and may refuse it."""
    is_encrypted: bool = False
    """Whether the files are."""

    def n_max(self, live_set: BoundedSet) -> int:
        """The most positions that may be offloaded."""
        in_ram, on_disk = self.position_bytes(live_set)
        n_budget, n_disk = live_set.budget.tokens, self.disk_bytes_max // self.layout.token_bytes
        n_stored = self._n_stored(live_set)
        n_bytes = self.bytes_max - self.index_bytes(live_set) * n_stored
        n_disk = max(0, min(n_disk, (n_bytes - in_ram * n_budget) // on_disk))
        return n_stored + max(n_budget, n_disk + (n_bytes - on_disk * n_disk) // in_ram)

    def _n_stored(self, live_set: BoundedSet) -> int:
        """The most positions offloaded whose rows the store has: they need room in the index alone."""
        in_ram, _ = self.position_bytes(live_set)
        left = self.bytes_max - in_ram * live_set.budget.tokens
        n_fit = max(0, left // self.index_bytes(live_set))
        return min(live_set.offloaded.n_stored, n_fit)

    def position_bytes(self, live_set: BoundedSet) -> tuple[int, int]:
        """RAM of a position whose rows are in RAM, and of one whose rows are on disk."""
        index = self.index_bytes(live_set)
        return self.layout.token_bytes + index, self.key_bytes(live_set) + index

    def key_bytes(self, live_set: BoundedSet) -> int:
        """Bytes of the keys of a position that the index of a chat reads."""
        assert isinstance(live_set.policy, Recalling)
        k = self.layout.k
        return sum(k[layer].row_bytes for layer in live_set.policy.layers(len(k)))

    def why_nothing(self, live_set: BoundedSet, n_ctx: int) -> str | None:
        """Why nothing of a chat with this live set's budget can come back, and what would help; None if
        something can. n_ctx: the most tokens that may be live"""
        n_budget = live_set.budget.tokens
        if self.n_max(live_set) > n_budget:
            return None
        token_bytes, _ = self.position_bytes(live_set)
        half, whole = (-(-n * token_bytes >> 20) for n in (min(2 * n_budget, n_ctx), n_ctx))
        return (
            f"--retention {live_set.budget.policy} brings nothing back: --recall-bytes has room for the "
            f"{n_budget} live tokens alone. {half}M would hold as many again, {whole}M the whole context."
        )

    def n_ram(self, live_set: BoundedSet) -> int:
        """The most offloaded positions whose rows may be in RAM: as many as may be live, if the disk takes
        the others, which the system keeps in memory that nothing else needs."""
        if self.disk_bytes_max >= self.layout.token_bytes:
            return live_set.budget.tokens
        return self.n_without_disk(live_set)

    def n_without_disk(self, live_set: BoundedSet) -> int:
        """The most offloaded positions whose rows RAM has room for."""
        offloaded, row_bytes = live_set.offloaded, self.layout.token_bytes
        n_bytes_keys = offloaded.n_bytes - len(offloaded.in_ram) * row_bytes
        left = self.bytes_max - n_bytes_keys - self.index_bytes(live_set) * len(offloaded)
        return max(live_set.budget.tokens, left // row_bytes)

    def make(self, live_set: BoundedSet) -> None:
        """Forget the oldest positions that are not live, if there are more than fit, those first whose rows
        the store does not have."""
        offloaded, n_max = live_set.offloaded, self.n_max(live_set)
        if len(offloaded) > n_max:
            n_stored = self._n_stored(live_set)
            n_over = len(offloaded) - n_stored - int(_STAYS_SHARE * (n_max - n_stored))
            copied = self._idle(offloaded.copied, live_set)
            stored = np.setdiff1d(self._idle(offloaded.positions, live_set), copied)
            self.forget(live_set, np.concatenate([copied, stored])[:n_over])

    def page_out(self, live_set: BoundedSet) -> None:
        """Write the oldest rows that are not live to disk, if RAM is to have no more. They must be indexed.
        If the disk does not take them, those are forgotten that RAM has no room for."""
        in_ram, n_max = live_set.offloaded.in_ram, self.n_ram(live_set)
        if len(in_ram) <= n_max or not self.disk_bytes_max:
            return
        n_live = int(np.isin(in_ram, live_set.positions()).sum())
        n_over = len(in_ram) - max(int(_STAYS_SHARE * n_max), n_live)
        going = self._idle(in_ram, live_set)[: max(0, n_over)]
        n_fit = self.disk_bytes_max // self.layout.token_bytes
        self.forget(live_set, going[: max(0, len(going) - n_fit)])
        going = going[max(0, len(going) - n_fit) :]
        n_bytes = len(going) * self.layout.token_bytes
        if self.writes.allows("offload", n_bytes):
            self._free_disk(live_set, n_bytes)
            if self._write(live_set, going):
                return
        n_over = len(live_set.offloaded.in_ram) - self.n_without_disk(live_set)
        self.forget(live_set, going[: max(0, n_over)])

    def page_out_read(self, live_set: BoundedSet) -> bool:
        """Write the oldest rows of a prompt that is still read to disk, live as they are, but for those of
        the sink. If the disk does not take them, rows that are not live are forgotten as far as RAM has
        no room for them, and False is returned."""
        in_ram, n_max = live_set.offloaded.in_ram, self.n_ram(live_set)
        if len(in_ram) <= n_max or not self.disk_bytes_max:
            return True
        going = np.setdiff1d(in_ram[: len(in_ram) - int(_STAYS_SHARE * n_max)], live_set.sink)
        n_bytes = len(going) * self.layout.token_bytes
        has_room = live_set.offloaded.disk_bytes + n_bytes <= self.disk_bytes_max
        if has_room and self.writes.allows("offload", n_bytes) and self._write(live_set, going):
            return True
        n_over = len(in_ram) - self.n_without_disk(live_set)
        self.forget(live_set, self._idle(in_ram, live_set)[: max(0, n_over)])
        return False

    def forget_idle(self, live_set: BoundedSet) -> None:
        """Forget the rows in RAM that are not live."""
        self.forget(live_set, self._idle(live_set.offloaded.in_ram, live_set))

    def _write(self, live_set: BoundedSet, going: Positions) -> bool:
        """Write rows to disk, which has room for them and is allowed to take them; False if it fails, which
        changes nothing."""
        policy = live_set.policy
        assert isinstance(policy, Recalling)
        if not len(going):
            return True
        n_bytes = len(going) * self.layout.token_bytes
        try:
            file = self._open_file(live_set, n_bytes)
            layers = policy.layers(self.layout.n_layer)
            rows = self._together(live_set, going)
            pages = Pages.of(rows, self.folder, file, layers, is_encrypted=self.is_encrypted)
        except OSError as error:
            log.warning("old rows of a long chat are not written", extra={"reason": str(error)})
            return False
        self.writes.add("offload", n_bytes)
        stay = np.setdiff1d(live_set.offloaded.positions, going, assume_unique=True)
        live_set.offloaded = live_set.offloaded.only(stay).add(pages)
        return True

    def forget(self, live_set: BoundedSet, gone: Positions) -> None:
        """Drop offloaded positions, which can then no longer be recalled."""
        if not len(gone):
            return
        policy, offloaded = live_set.policy, live_set.offloaded
        assert isinstance(policy, Recalling)
        policy.forget(gone)
        live_set.offloaded = offloaded.only(
            np.setdiff1d(offloaded.positions, gone, assume_unique=True)
        )

    def lay_out(self, rows: KVRows, positions: Positions, numbers: Positions) -> RowChunk:
        """Copy the rows numbered `numbers`, similar ones adjacent; `positions` are the chat's
        positions of all `rows`."""
        from towerd.retention.layout import cluster_order

        keys = keys_of(rows, self.head_size, _LAYOUT_LAYER_STEP)
        return RowChunk.of(rows, positions, numbers[cluster_order(keys[:, :, numbers])])

    def _together(self, live_set: BoundedSet, positions: Positions) -> RowChunk:
        rows, places = live_set.offloaded.rows(positions), live_set.offloaded.places(positions)
        chunk = self.lay_out(rows, positions, np.arange(len(positions)))
        return replace(chunk, places=places[np.searchsorted(positions, chunk.positions)])

    def _free_disk(self, live_set: BoundedSet, n_bytes: int) -> None:
        """Forget files until `n_bytes` more fit."""
        while live_set.offloaded.disk_bytes + n_bytes > self.disk_bytes_max:
            oldest = live_set.offloaded.oldest_file()
            assert oldest is not None, "an empty disk has room"
            self.forget(live_set, live_set.offloaded.filed(oldest))

    def _open_file(self, live_set: BoundedSet, n_bytes: int) -> PageFile | None:
        """The newest file of a chat, if `n_bytes` may be added to it."""
        file = live_set.offloaded.newest_file()
        if file is None or file.n_bytes + n_bytes > self.disk_bytes_max // _FILES:
            return None
        return file

    def index_bytes(self, live_set: BoundedSet) -> int:
        """Bytes that a position takes in the index of a chat."""
        assert isinstance(live_set.policy, Recalling)
        n_kv = self.layout.k[0].n_elements // self.head_size
        return live_set.policy.index_bytes(self.layout.n_layer, n_kv, self.head_size)

    def _idle(self, positions: Positions, live_set: BoundedSet) -> Positions:
        return np.setdiff1d(positions, live_set.positions())
